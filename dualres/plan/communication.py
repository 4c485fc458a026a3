"""Bytes that a rank sends in one training step, by kind: what each collective must move, whatever carries it.

    gather, scatter, all-to-all:  (n−1)/n of the whole message        all-reduce:  2 (n−1)/n of it

Ranks of a group send alike, but for uneven shards: this is the first of each pipeline rank. Routing to experts is taken
to be uniform.
"""
# n ranks of a group

from typing import NamedTuple

from dualres.plan.activations import PartBytes
from dualres.plan.local_model import part_of
from dualres.plan.memory import FLOAT32
from dualres.plan.pipeline_schedule import Gathers, gathers
from dualres.plan.stages import PipelineRank, PlannedChunk

FLOAT64 = 8


class Communication(NamedTuple):
    """Bytes of one step."""

    weights: int
    gradients: int
    tensor: int
    experts: int
    pipeline: int
    shared: int
    control: int

    @property
    def total(self) -> int:
        return sum(self)


DESCRIPTIONS = {
    "weights": "gathers of sharded weights",
    "gradients": "scatters of their gradients",
    "tensor": "branch inputs and outputs, embedding, loss",
    "experts": "rows to experts and back, uniform routing",
    "pipeline": "states forward, gradients of states back",
    "shared": "gradients of weights that several ranks hold whole",
    "control": "the gradient norm",
}


def communication(rank: PipelineRank) -> Communication:
    count, mesh = rank.micro_batches, rank.mesh
    parts = [chunk_communication(rank, chunk) for chunk in rank.chunks]
    weights, gradients = sharded_bytes(rank)
    return Communication(
        weights=sum(weights),
        gradients=sum(gradients),
        tensor=count * sum(part.tensor for part in parts),
        experts=count * sum(part.experts for part in parts),
        pipeline=count * rank.between_stages,
        shared=shared_bytes(rank),
        control=part_of(2 * FLOAT64, mesh.processes),
    )


def sharded_bytes(rank: PipelineRank) -> tuple[list[int], list[int]]:
    """Bytes of weights and of gradients that FSDP2 moves: of those sharded over all data-parallel ranks, of experts."""
    count, mesh = rank.micro_batches, rank.mesh
    weights, gradients = [0, 0], [0, 0]
    for chunk in rank.chunks:
        # Forward and backward; the root keeps its weights between them.
        times = Gathers(2 * count, count) if mesh.pipeline == 1 else gathers(rank.actions, chunk.number)
        for unit, gathered in [*((unit, times.blocks) for unit in chunk.units), (chunk.root, times.root)]:
            for weight in unit:
                moved = weight.shard(mesh) * (weight.ranks(mesh) - 1)  # padded
                weights[weight.expert] += gathered * rank.width * moved
                gradients[weight.expert] += (1 if mesh.pipeline > 1 else count) * FLOAT32 * moved
    return weights, gradients


def chunk_communication(rank: PipelineRank, chunk: PlannedChunk) -> PartBytes:
    """Within tensor groups and between experts, for one micro-batch, forward and backward."""
    found = PartBytes()
    for b in chunk.blocks:
        found = found.plus(rank.passes.blocks[b])
    model, ranks = rank.config.model, rank.mesh.tensor
    tokens = rank.config.train.micro_batch * model.context
    rows = tokens * (model.embedding_width or model.width) * rank.width
    ends = (chunk.arriving is None) + (chunk.leaving is None)
    found = found.plus(PartBytes(tensor=2 * part_of(rows, ranks)), ends)
    if chunk.leaving is None:  # the log-partition of its range and the target's logit, to all others
        found = found.plus(PartBytes(tensor=tokens * 2 * FLOAT32 * (ranks - 1)))
    return found


def shared_bytes(rank: PipelineRank) -> int:
    """Of the gradients that several ranks hold whole: once a step, in tensor groups and between both vocabularies."""
    mesh, found = rank.mesh, 0
    for chunk in rank.chunks:
        whole = sum(weight.shard(mesh) for weight in chunk.weights if weight.whole) * FLOAT32
        found += part_of(2 * whole, mesh.tensor)
        ends = chunk.arriving is None or chunk.leaving is None
        if mesh.pipeline > 1 and ends and rank.config.model.tied_embeddings:
            found += sum(weight.shard(mesh) for weight in chunk.weights if weight.vocabulary) * FLOAT32
    return found
