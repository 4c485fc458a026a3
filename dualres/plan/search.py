"""The fastest mesh that fits, of all that the model can be cut along, by the estimate of a mesh that is given.

Meshes are visited in the order of the seconds that they take at least. When those of the next are more than the best
one takes, it is the best of all.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from dualres.config.schema import Config, ConfigError, ParallelConfig, TrainConfig
from dualres.config.validation import divisors
from dualres.model.activation_checkpointing import Recompute
from dualres.parallel.mesh import Mesh, block_count, mesh_of
from dualres.plan.communication import sent
from dualres.plan.estimate import Estimate, estimate
from dualres.plan.hardware import GIB, USABLE, Hardware
from dualres.plan.local_model import part_of
from dualres.plan.memory import least_memory
from dualres.plan.passes import Back, Kept, Passes, Talk
from dualres.plan.ranks import chunks_of
from dualres.plan.run_memory import WIDTH
from dualres.plan.time import cost_of, seconds
from dualres.util.progress import Show, silent

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")  # from fast to small
MOST_VIRTUAL = 4
MOST_MICRO_BATCH = 8  # sequences, of a dense model


class Fixed(NamedTuple):
    """What the user has said, and is not searched."""

    micro_batch: bool
    recompute: bool


class Chosen(NamedTuple):
    """A config that says its mesh, and what it costs."""

    config: Config
    estimate: Estimate


class Row(NamedTuple):
    """A config that says its mesh, before its passes are counted."""

    config: Config
    mesh: Mesh
    seconds: float  # at least
    memory: int  # at least


def choose(config: Config, processes: int, hardware: Hardware, fixed: Fixed, show: Show = silent) -> Chosen:
    """The fastest of those that fit `USABLE` of a GPU; an error says what the smallest would need.

    Of equally fast ones that with the recipe's micro-batch, else with the largest.
    """

    def order(train: TrainConfig, seconds: float) -> tuple[float, bool, int]:
        """Better ones first; seconds that differ by rounding are the same."""
        return float(f"{seconds:.9g}"), train.micro_batch != config.train.micro_batch, -train.micro_batch

    show(f"{processes:,} {'GPU' if processes == 1 else 'GPUs'}: how they can be cut")
    found = [(order(row.config.train, row.seconds), row) for row in rows(config, processes, hardware, fixed)]
    best: tuple[tuple[float, bool, int], Chosen] | None = None
    least = math.inf
    for number, (bound, row) in enumerate(sorted(found, key=lambda pair: pair[0]), 1):
        if best is not None and bound >= best[0]:
            break
        train, held = row.config.train, row.memory
        if held <= USABLE * hardware.memory:
            what = f"micro-batch {train.micro_batch}, recompute {train.recompute}"
            show(f"{number:,} of {len(found):,} at most: {row.mesh.describe()}, {what}")
            made = estimate(row.config, row.mesh, hardware)
            held, place = made.memory[made.fullest].total, order(train, made.seconds.total)
            if made.fits(hardware) and (best is None or place < best[0]):
                best = place, Chosen(row.config, made)
        least = min(least, held)
    if best is not None:
        return best[1]
    if not found:
        raise ConfigError(
            f"train.global_batch={config.train.global_batch} has fewer micro-batches than {processes} GPUs have "
            f"data-parallel ranks, on every mesh: use --set train.global_batch={_enough(config, processes, hardware)}"
            " or more, or fewer GPUs"
        )
    raise ConfigError(
        f"{config.residual.method} fits {USABLE:.0%} of {hardware.memory / GIB:g} GiB on no mesh of {processes} GPUs: "
        f"the smallest needs at least {least / GIB:.3g} GiB: use more GPUs, or larger ones"
    )


def rows(config: Config, processes: int, hardware: Hardware, fixed: Fixed) -> Iterator[Row]:
    """Every mesh and micro-batch with every recomputation, and what can be said without counting passes."""
    for candidate, mesh in candidates(config, processes, hardware, fixed):
        passes = least_passes(candidate, mesh)
        ranks = chunks_of(candidate, mesh, keeps_history=passes.keeps_history)
        said = [sent(candidate, mesh, chunks, passes, rank) for rank, chunks in enumerate(ranks)]
        width = WIDTH[candidate.train.precision]
        held = max(least_memory(mesh, chunks, width, candidate.train.engine) for chunks in ranks)
        for recompute in [config.train.recompute] if fixed.recompute else RECOMPUTE:
            train = dataclasses.replace(candidate.train, recompute=recompute)
            settled = dataclasses.replace(candidate, train=train)
            yield Row(settled, mesh, seconds(settled, mesh, ranks, passes, said, hardware).total, held)


def least_passes(config: Config, mesh: Mesh) -> Passes:
    """What must be sent, by the shapes of the model: no byte is kept, and nothing is sent again."""
    model, train, cost = config.model, config.train, cost_of(config.model, config.residual)
    stream = train.micro_batch * model.context * model.width * WIDTH[train.precision]
    tensor = part_of(stream, mesh.tensor) * (2 if model.moe is None else 1)  # an MoE branch gathers nothing
    rows = part_of(stream // mesh.tensor * model.moe.active, mesh.expert_ranks) if model.moe else 0
    layers = [branches // 2 for branches in cost.branches]
    talk = tuple(Talk(2 * n * tensor, 2 * n * rows) for n in layers)
    return Passes(
        shared=0,
        start=Kept(),
        blocks=(Kept(),) * len(layers),
        end=Kept(),
        loss=0,
        logits=0,
        forward=talk,
        backward=tuple(Back(0, sent) for sent in talk),
        stream=stream // mesh.tensor,
        streams=cost.streams,
        keeps_history=cost.keeps_history,
    )


def candidates(config: Config, processes: int, hardware: Hardware, fixed: Fixed) -> Iterator[tuple[Config, Mesh]]:
    """Every mesh that can be, with every micro-batch that the recipe allows. Larger tensor groups come last."""
    for parallel in _parallels(config, processes, hardware):
        for micro_batch in _micro_batches(config, fixed):
            train = dataclasses.replace(
                config.train,
                micro_batch=micro_batch,
                parallel=parallel,
                engine="single" if processes == 1 else "fsdp2",
            )
            try:
                made = dataclasses.replace(config, train=train)
                mesh = mesh_of(made, processes)
            except ConfigError:
                continue
            if made.train.global_batch >= micro_batch * mesh.data:
                yield made, mesh


def _parallels(config: Config, processes: int, hardware: Hardware) -> Iterator[ParallelConfig]:
    model, blocks = config.model, block_count(config)
    tensors = [n for n in divisors(math.gcd(model.heads, model.kv_heads)) if n <= hardware.node_size]
    experts = divisors(model.moe.experts) if model.moe else [1]
    for tensor in tensors:
        for pipeline in (n for n in divisors(processes) if n <= blocks):
            for virtual in range(1, min(MOST_VIRTUAL, blocks // pipeline) + 1 if pipeline > 1 else 2):
                for expert in experts:
                    yield ParallelConfig(tensor, pipeline, virtual, expert, sequence_parallel=tensor > 1)


def _micro_batches(config: Config, fixed: Fixed) -> list[int]:
    """Routers balance each micro-batch, so that of a sparse model is part of its recipe."""
    train = config.train
    if fixed.micro_batch or config.model.moe is not None:
        return [train.micro_batch]
    return sorted({train.micro_batch, *(n for n in divisors(train.global_batch) if n <= MOST_MICRO_BATCH)})


def _enough(config: Config, processes: int, hardware: Hardware) -> int:
    """Sequences for one micro-batch on every data-parallel rank of the deepest and widest mesh."""
    ranks = [
        processes // (p.tensor * p.pipeline)
        for p in _parallels(config, processes, hardware)
        if processes % (p.tensor * p.pipeline) == 0
    ]
    return config.train.micro_batch * min(ranks)
