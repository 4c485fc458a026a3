"""Memory, communication and step time of one model on one mesh with one engine."""

import dataclasses
from typing import NamedTuple

from dualres.config.schema import Config, ParallelConfig
from dualres.parallel.mesh import Mesh
from dualres.plan.activations import Memory, passes_of
from dualres.plan.communication import Communication, communication
from dualres.plan.hardware import USABLE, Hardware
from dualres.plan.local_model import Share
from dualres.plan.memory import memory
from dualres.plan.stages import PipelineRank, pipeline_ranks
from dualres.plan.time import StepSeconds, step_seconds, token_cost


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
    rate = config.train.global_batch * config.model.context / seconds.total
    flops = token_cost(config.model, config.residual).flops
    return StepEstimate(
        tuple(map(communication, ranks)),
        tuple(rank.micro_batches * rank.between_stages for rank in resending),
        seconds,
        rate,
        3 * (flops.total - flops.residual) * rate / (mesh.processes * hardware.peak_flops),
    )
