"""Bytes that a rank sends in one training step, by kind: the minimum that each collective moves, on any transport.

    gather, scatter, all-to-all:  (n−1)/n of the whole message        all-reduce:  2 (n−1)/n of it

All ranks of a group send the same, except for uneven shards: these are the bytes of the first rank of each pipeline
rank. Routing to experts is assumed to be uniform.
"""
# n ranks of a group

from typing import Annotated, NamedTuple

from dualres.plan.local_model import part_of
from dualres.plan.memory import FLOAT32
from dualres.plan.stages import PipelineRank, PlannedChunk, gathers

FLOAT64 = 8


class Communication(NamedTuple):
    """Bytes of one step; a plan prints the annotations."""

    weights: Annotated[int, "gathers of sharded weights"]
    gradients: Annotated[int, "scatters of their gradients"]
    tensor: Annotated[int, "branch inputs and outputs, embedding, loss"]
    experts: Annotated[int, "rows to experts and back, uniform routing"]
    pipeline: Annotated[int, "states forward, gradients of states back"]
    shared: Annotated[int, "gradients of weights that several ranks hold whole"]
    control: Annotated[int, "the gradient norm"]

    @property
    def total(self) -> int:
        return sum(self)


def communication(rank: PipelineRank) -> Communication:
    count = rank.micro_batches
    tensor, experts = map(sum, zip(*(branch_bytes(rank, chunk) for chunk in rank.chunks), strict=True))
    weights, gradients = sharded_bytes(rank)
    return Communication(
        weights=sum(weights),
        gradients=sum(gradients),
        tensor=count * tensor,
        experts=count * experts,
        pipeline=count * rank.between_stages,
        shared=shared_bytes(rank),
        control=part_of(2 * FLOAT64, rank.mesh.processes),
    )


def sharded_bytes(rank: PipelineRank) -> tuple[list[int], list[int]]:
    """Bytes of weights and of gradients that FSDP2 moves, each as [sharded over all data-parallel ranks, experts]."""
    count, mesh = rank.micro_batches, rank.mesh
    weights, gradients = [0, 0], [0, 0]
    for chunk in rank.chunks:
        of_block, of_root = gathers(mesh, count, chunk.number)
        for unit, gathered in [*((unit, of_block) for unit in chunk.units), (chunk.root, of_root)]:
            for weight in unit:
                moved = weight.shard(mesh) * (weight.ranks(mesh) - 1)  # padded
                weights[weight.expert] += gathered * rank.width * moved
                gradients[weight.expert] += (1 if mesh.pipeline > 1 else count) * FLOAT32 * moved
    return weights, gradients


def branch_bytes(rank: PipelineRank, chunk: PlannedChunk) -> tuple[int, int]:
    """Bytes within the tensor group and to other ranks' experts, for one micro-batch, forward and backward."""
    tensor, experts = map(sum, zip(*(rank.passes.sent[b] for b in chunk.blocks), strict=True))
    model, ranks = rank.config.model, rank.mesh.tensor
    tokens = rank.config.train.micro_batch * model.context
    rows = tokens * (model.embedding_width or model.width) * rank.width
    tensor += (chunk.first + chunk.last) * 2 * part_of(rows, ranks)
    if chunk.last:  # log-partition of the rank's range and the target's logit, to all others
        tensor += tokens * 2 * FLOAT32 * (ranks - 1)
    return tensor, experts


def shared_bytes(rank: PipelineRank) -> int:
    """Bytes of unsharded gradients summed once a step, in tensor groups and between both vocabularies."""
    mesh, size = rank.mesh, 0
    for chunk in rank.chunks:
        whole = sum(weight.shard(mesh) for weight in chunk.weights if weight.whole) * FLOAT32
        size += part_of(2 * whole, mesh.tensor)
        if mesh.pipeline > 1 and (chunk.first or chunk.last) and rank.config.model.tied_embeddings:
            size += sum(weight.shard(mesh) for weight in chunk.weights if weight.vocabulary) * FLOAT32
    return size
