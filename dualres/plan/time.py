"""Seconds of a training step from stated peaks and bandwidths: a model, to compare meshes with and not to promise.

    step = (micro-batches + (P−1)/V) · (products + pathways + tensor + experts + sends) + what sharding cannot hide
           + gradients once a step + optimizer

of the slowest pipeline rank. Collectives of tensor groups and experts wait; FSDP2's hide behind the products as far as
these last; sends of a pipeline wait.
"""
# B batch  T tokens

import functools
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dualres.config.schema import Config, ModelConfig, ResidualConfig
from dualres.model.accounting import (
    TOKENS_OF_TRAFFIC,
    Flops,
    StreamTraffic,
    flops_per_token,
    pathway_alone,
    residual_traffic,
)
from dualres.model.decoder import build_decoder
from dualres.ops import dispatch
from dualres.parallel.mesh import Mesh
from dualres.parallel.pipeline import micro_batches
from dualres.plan.communication import Sent, chunk_talk, sharded
from dualres.plan.hardware import Hardware
from dualres.plan.passes import Passes
from dualres.plan.ranks import Chunk
from dualres.plan.run_memory import WIDTH
from dualres.residual.pathway import History

UPDATE_BYTES = 36  # per weight: AdamW reads four numbers and writes three, clipping reads and writes one


class Seconds(NamedTuple):
    """Of one step, on the slowest pipeline rank."""

    products: float  # matrix products and attention
    pathways: float  # residual streams through the GPU's memory
    tensor: float
    experts: float
    pipeline: float  # sends between stages
    bubble: float  # a stage that waits for the first and the last micro-batches
    sharding: float  # FSDP2's gathers and scatters, beyond what products hide
    update: float  # sums of shared gradients, clipping, AdamW

    @property
    def total(self) -> float:
        """The step."""
        return sum(self)


class Cost(NamedTuple):
    """What a model computes, per token."""

    flops: Flops  # forward
    branches: tuple[int, ...]  # of each block
    elements: tuple[float, ...]  # of streams that each block's pathway moves, forward and backward
    forward: float  # share of these in the forward pass
    readout: float
    streams: int
    keeps_history: bool


@functools.cache
def cost_of(model: ModelConfig, residual: ResidualConfig) -> Cost:
    """Counted once for all meshes."""
    decoder = build_decoder(model, residual, device="meta")
    whole, rows = residual_traffic(decoder), _pathway_rows(model, residual)
    scale = sum(whole) / sum(rows)
    *blocks, readout = (scale * count for count in rows)
    stack, flops = list(decoder.stack), flops_per_token(decoder)
    return Cost(
        flops,
        tuple(len(block.branches) for block in stack),
        tuple(blocks),
        whole.forward / sum(whole),
        readout,
        decoder.stack.streams,
        stack[0].pathway.keeps_history,
    )


def _pathway_rows(model: ModelConfig, residual: ResidualConfig) -> list[int]:
    """What every block's pathway and the readout read and write of streams in a forward pass, per token."""
    row = 1, TOKENS_OF_TRAFFIC, model.width
    found: list[int] = []
    stack = build_decoder(model, residual, device="meta").stack
    with dispatch.for_shapes(), FakeTensorMode(allow_non_fake_inputs=True):
        stack.to_empty(device="cpu")
        history: History = (torch.empty(stack.streams, *row),)
        for block in stack:
            with StreamTraffic(row) as moved:
                history = pathway_alone(block, history)
            found.append(moved.rows)
        with StreamTraffic(row) as moved:
            stack.readout(*history)
    return [*found, moved.rows]


def seconds(
    config: Config, mesh: Mesh, ranks: list[tuple[Chunk, ...]], passes: Passes, sent: list[Sent], hardware: Hardware
) -> Seconds:
    """Of a step, by the pipeline rank that takes longest."""
    return max(
        (_rank_seconds(config, mesh, ranks[rank], passes, rank, sent[rank], hardware) for rank in range(mesh.pipeline)),
        key=lambda found: found.total,
    )


def _rank_seconds(
    config: Config, mesh: Mesh, chunks: tuple[Chunk, ...], passes: Passes, rank: int, sent: Sent, hardware: Hardware
) -> Seconds:
    train = config.train
    count = micro_batches(train.global_batch, train.micro_batch, mesh)
    products = pathways = tensor = experts = 0.0
    for chunk in chunks:
        flops, elements = _work(config, mesh, chunk)
        products += flops / (hardware.peak_flops * hardware.utilisation)
        pathways += elements * WIDTH[train.precision] / hardware.memory_bandwidth
        talk = chunk_talk(config, mesh, chunk, passes)
        tensor += talk.tensor / hardware.ring(mesh.tensor, 1)
        experts += hardware.exchange_seconds(talk.experts, mesh.expert_ranks)
    sends = sent.pipeline / count / hardware.next_stage(mesh.processes)
    once = products + pathways + tensor + experts + sends
    rings = hardware.ring(mesh.data, mesh.tensor), hardware.ring(mesh.rest, mesh.expert_ranks)
    moved = sharded(config, mesh, chunks, rank)
    gathers = sum(size / ring for size, ring in zip(moved.weights, rings, strict=True))
    scatters = sum(size / ring for size, ring in zip(moved.gradients, rings, strict=True))
    if mesh.pipeline > 1:  # gradients are scattered after the last micro-batch
        waiting = max(0.0, gathers - count * products) + scatters
    else:
        waiting = max(0.0, gathers + scatters - count * products)
    shards = sum(weight.shard(mesh) for chunk in chunks for weight in chunk.weights.all)
    update = sent.shared / hardware.network_bandwidth + shards * UPDATE_BYTES / hardware.memory_bandwidth
    bubble = (mesh.pipeline - 1) / mesh.virtual * once
    return Seconds(
        count * products, count * pathways, count * tensor, count * experts, count * sends, bubble, waiting, update
    )


def _work(config: Config, mesh: Mesh, chunk: Chunk) -> tuple[float, float]:
    """Flops and elements of streams of one micro-batch, forward, backward and what is computed again."""
    train, cost = config.train, cost_of(config.model, config.residual)
    flops, again = cost.flops, {"none": 0, "selective": 0, "full": 1}[train.recompute]
    share = sum(cost.branches[b] for b in chunk.blocks) / sum(cost.branches)
    branches = share * (flops.branches + flops.attention) * (3 + again)
    elements = sum(cost.elements[b] for b in chunk.blocks) * (1 + (train.recompute != "none") * cost.forward)
    last = chunk.leaving is None
    tokens = train.micro_batch * config.model.context / mesh.tensor
    return tokens * (branches + 3 * flops.vocabulary * last), tokens * (elements + cost.readout * last)
