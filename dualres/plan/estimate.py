"""Memory, communication and step time of one model on one mesh with one engine.

Seconds are for comparing meshes. From nominal peaks and bandwidths,

    step = (micro-batches + (P−1)/V) · (products + pathways + tensor + experts + sends) + exposed sharding
           + gradients once a step + optimizer

on the slowest pipeline rank. Collectives of tensor groups and experts and sends between stages are exposed; FSDP2's
are exposed only as far as they take longer than the products.
"""

import dataclasses
import functools
from typing import Annotated, NamedTuple

from dualres.config.schema import Config, ModelConfig, ParallelConfig, ResidualConfig
from dualres.model.accounting import Flops, flops_per_token, residual_traffic
from dualres.model.decoder import build_decoder, meta_decoder
from dualres.parallel.mesh import Mesh
from dualres.plan.activations import Memory, passes_of
from dualres.plan.communication import Communication, branch_bytes, communication, sharded_bytes, shared_bytes
from dualres.plan.hardware import USABLE, Hardware
from dualres.plan.local_model import Share
from dualres.plan.memory import memory
from dualres.plan.stages import PipelineRank, PlannedChunk, pipeline_ranks

UPDATE_BYTES = 36  # per weight: AdamW reads four numbers and writes three, clipping reads one and writes one


class StepSeconds(NamedTuple):
    """Seconds of one step, on the slowest pipeline rank."""

    products: Annotated[float, "matmuls and attention"]
    pathways: Annotated[float, "memory traffic of residual streams"]
    tensor: Annotated[float, "collectives of tensor parallelism"]
    experts: Annotated[float, "all-to-all of experts"]
    pipeline: Annotated[float, "sends between stages"]
    bubble: Annotated[float, "stages idle in the first and last micro-batches"]
    sharding: Annotated[float, "FSDP2's collectives that do not overlap with products"]
    update: Annotated[float, "shared gradients, clipping, AdamW"]

    @property
    def total(self) -> float:
        return sum(self)


class TokenCost(NamedTuple):
    """Computation and memory traffic of a model per token."""

    flops: Flops  # forward
    branches: tuple[int, ...]  # in each block
    elements: tuple[float, ...]  # of streams that each block's pathway and the readout move, forward and backward
    forward: float  # fraction of these in the forward pass
    streams: int
    keeps_history: bool


@functools.cache
def token_cost(model: ModelConfig, residual: ResidualConfig) -> TokenCost:
    decoder = build_decoder(model, residual, device="meta")
    traffic, blocks = residual_traffic(decoder), list(decoder.stack)
    both_passes = traffic.forward + traffic.backward
    scale = model.width * both_passes / traffic.forward
    return TokenCost(
        flops_per_token(decoder),
        tuple(len(block.branches) for block in blocks),
        tuple(scale * rows for rows in traffic.parts),
        traffic.forward / both_passes,
        decoder.stack.streams,
        decoder.stack.keeps_history,
    )


def step_seconds(ranks: list[PipelineRank], hardware: Hardware) -> StepSeconds:
    """Step time of the slowest pipeline rank."""
    return max((_rank_seconds(rank, hardware) for rank in ranks), key=lambda seconds: seconds.total)


def _rank_seconds(rank: PipelineRank, hardware: Hardware) -> StepSeconds:
    count, mesh = rank.micro_batches, rank.mesh
    products = pathways = tensor = experts = 0.0
    for chunk in rank.chunks:
        flops, elements = _work(rank, chunk)
        products += flops / (hardware.peak_flops * hardware.utilization)
        pathways += elements * rank.width / hardware.memory_bandwidth
        gathered, exchanged = branch_bytes(rank, chunk)
        tensor += gathered / hardware.ring(mesh.tensor, 1)
        experts += hardware.exchange_seconds(exchanged, mesh.expert_ranks)
    sends = rank.between_stages / hardware.next_stage(mesh.processes)
    once = products + pathways + tensor + experts + sends
    rings = hardware.ring(mesh.data, mesh.tensor), hardware.ring(mesh.rest, mesh.expert_ranks)
    gathers, scatters = (
        sum(size / ring for size, ring in zip(sizes, rings, strict=True)) for sizes in sharded_bytes(rank)
    )
    if mesh.pipeline > 1:  # gradients are scattered after the last micro-batch
        exposed = max(0.0, gathers - count * products) + scatters
    else:
        exposed = max(0.0, gathers + scatters - count * products)
    shards = sum(weight.shard(mesh) for weight in rank.weights)
    return StepSeconds(
        products=count * products,
        pathways=count * pathways,
        tensor=count * tensor,
        experts=count * experts,
        pipeline=count * sends,
        bubble=(mesh.pipeline - 1) / mesh.virtual * once,
        sharding=exposed,
        update=shared_bytes(rank) / hardware.network_bandwidth + shards * UPDATE_BYTES / hardware.memory_bandwidth,
    )


def _work(rank: PipelineRank, chunk: PlannedChunk) -> tuple[float, float]:
    """Flops and stream elements of one micro-batch: forward, backward and recomputation."""
    config, train = rank.config, rank.config.train
    cost = token_cost(config.model, config.residual)
    flops, again = cost.flops, train.recompute == "full"
    share = sum(cost.branches[b] for b in chunk.blocks) / sum(cost.branches)
    branches = share * (flops.branches + flops.attention) * (3 + again)
    elements = sum(cost.elements[b] for b in chunk.blocks) * (1 + (train.recompute != "none") * cost.forward)
    tokens = train.micro_batch * config.model.context / rank.mesh.tensor
    return tokens * (branches + 3 * flops.vocabulary * chunk.last), tokens * (elements + cost.elements[-1] * chunk.last)


class StepEstimate(NamedTuple):
    """Communication by pipeline rank, and step time."""

    communication: tuple[Communication, ...]
    resent: tuple[int, ...]  # bytes that the pipeline would send if every boundary carried the whole history again
    seconds: StepSeconds
    tokens_per_second: float
    utilization: float  # fraction of the peak, counting the products that the model needs


class MeshEstimate(NamedTuple):
    """Estimates for one model on one mesh."""

    config: Config
    engine: str
    mesh: Mesh
    memory: tuple[Memory, ...]  # of each pipeline rank
    step: StepEstimate | None  # for one process and FSDP2; the speed of DDP and DeepSpeed is not estimated

    @property
    def fullest(self) -> int:
        """The pipeline rank with the highest peak memory."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total)

    @property
    def peak_memory(self) -> int:
        """Bytes of the fullest rank."""
        return self.memory[self.fullest].total

    def fits(self, hardware: Hardware) -> bool:
        return self.peak_memory <= USABLE * hardware.memory


def estimate(config: Config, engine: str, mesh: Mesh, hardware: Hardware) -> MeshEstimate:
    meta_decoder(config.model, config.residual)  # raises for an invalid model, before a part of it does
    # Counts of the model alone are the same for every mesh and cached.
    alone = dataclasses.replace(config, train=dataclasses.replace(config.train, parallel=ParallelConfig()))
    passes = passes_of(alone, Share(mesh.tensor, mesh.expert_ranks), engine)
    ranks = pipeline_ranks(config, engine, mesh, passes)
    timed = engine == "fsdp2" or mesh.processes == 1
    return MeshEstimate(config, engine, mesh, tuple(map(memory, ranks)), _step(ranks, hardware) if timed else None)


def _step(ranks: list[PipelineRank], hardware: Hardware) -> StepEstimate:
    config, engine, mesh, *_, passes = ranks[0]
    resending = pipeline_ranks(config, engine, mesh, passes, resend=True)
    seconds = step_seconds(ranks, hardware)
    rate = config.tokens_per_step / seconds.total
    flops = token_cost(config.model, config.residual).flops
    return StepEstimate(
        tuple(map(communication, ranks)),
        tuple(rank.micro_batches * rank.between_stages for rank in resending),
        seconds,
        rate,
        3 * (flops.total - flops.residual) * rate / (mesh.processes * hardware.peak_flops),
    )
