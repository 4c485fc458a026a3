"""A model on a mesh: memory, bytes sent and seconds of a step."""

from typing import NamedTuple

from dualres.config.schema import Config
from dualres.parallel.mesh import Mesh
from dualres.parallel.pipeline import micro_batches
from dualres.plan.communication import Sent, handed_on, sent
from dualres.plan.extrapolate import passes_of
from dualres.plan.hardware import USABLE, Hardware
from dualres.plan.local_model import Share
from dualres.plan.memory import Memory, memory
from dualres.plan.passes import Passes
from dualres.plan.ranks import chunks_of, plain
from dualres.plan.time import Seconds, cost_of, seconds


class Estimate(NamedTuple):
    """What a plan says of one model on one mesh."""

    mesh: Mesh
    micro_batches: int  # of a data-parallel rank in a step
    memory: tuple[Memory, ...]  # of each pipeline rank
    sent: tuple[Sent, ...]
    resent: tuple[int, ...]  # bytes that the pipeline would send if every boundary carried the whole history again
    seconds: Seconds
    tokens_per_second: float
    utilisation: float  # of the peak, by the products that the model needs

    @property
    def fullest(self) -> int:
        """The pipeline rank that holds most."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total)

    @property
    def loudest(self) -> int:
        """The pipeline rank that sends most."""
        return max(range(len(self.sent)), key=lambda rank: self.sent[rank].total)

    def fits(self, hardware: Hardware) -> bool:
        """Whether every rank does."""
        return self.memory[self.fullest].total <= USABLE * hardware.memory


def engine_of(mesh: Mesh) -> str:
    """One process needs no sharding."""
    return "single" if mesh.processes == 1 else "fsdp2"


def estimate(config: Config, mesh: Mesh, hardware: Hardware, passes: Passes | None = None) -> Estimate:
    """By counted passes, or by those that are given."""
    engine = engine_of(mesh)
    if passes is None:
        passes = passes_of(plain(config), Share(mesh.tensor, mesh.expert_ranks), engine)
    ranks = chunks_of(config, mesh, keeps_history=passes.keeps_history)
    naive = chunks_of(config, mesh, keeps_history=passes.keeps_history, resend=True)
    held = [memory(config, mesh, chunks, passes, rank, engine) for rank, chunks in enumerate(ranks)]
    said = [sent(config, mesh, chunks, passes, rank) for rank, chunks in enumerate(ranks)]
    took = seconds(config, mesh, ranks, passes, said, hardware)
    tokens, flops = config.train.global_batch * config.model.context, cost_of(config.model, config.residual).flops
    rate, products = tokens / took.total, 3 * (flops.total - flops.residual)
    count = micro_batches(config.train.global_batch, config.train.micro_batch, mesh)
    return Estimate(
        mesh,
        count,
        tuple(held),
        tuple(said),
        tuple(count * handed_on(chunks, passes) for chunks in naive),
        took,
        rate,
        products * rate / (mesh.processes * hardware.peak_flops),
    )
