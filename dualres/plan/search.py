"""Finds the fastest mesh that fits, and what to change if a plan does not fit.

Meshes are visited in the order of a lower bound of their step time; the search stops when the next bound exceeds the
best time so far.
"""

import dataclasses
import math
from collections.abc import Iterator, Set
from itertools import product
from typing import Any, NamedTuple

from dualres.config.schema import Config, ConfigError, ParallelConfig, TrainConfig
from dualres.config.validation import divisors
from dualres.model.block import Recompute
from dualres.parallel.mesh import Mesh, block_count, mesh_of
from dualres.plan.activations import Memory, Passes
from dualres.plan.estimate import MeshEstimate, estimate, step_seconds, token_cost
from dualres.plan.hardware import GIB, USABLE, Hardware
from dualres.plan.local_model import part_of
from dualres.plan.memory import ample_memory, minimum_memory, stored_memory
from dualres.plan.stages import pipeline_ranks
from dualres.train.engines.build import engine_mesh
from dualres.train.preflight import Check, engine_or_configured
from dualres.util.errors import TrainError
from dualres.util.progress import Show, plural, silent

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")  # from the fastest to the smallest
MAX_VIRTUAL = 4  # chunks of a pipeline rank
MAX_MICRO_BATCH = 8  # sequences, for a dense model
FAR_TOO_MUCH = 1.5  # times the memory of a device: a larger estimate refuses the start


class Candidate(NamedTuple):
    """A config with its mesh, and lower bounds of its time and memory."""

    config: Config
    mesh: Mesh
    seconds: float
    memory: int


def choose(
    config: Config, processes: int, hardware: Hardware, fixed: Set[str] = frozenset(), show: Show = silent
) -> MeshEstimate:
    """The fastest mesh that fits `USABLE` of a GPU; the error states what the smallest would need.

    Ties go to the recipe's micro-batch, then to the largest. `fixed`: which of train.micro_batch and train.recompute
    must not change.
    """

    def order(train: TrainConfig, seconds: float) -> tuple[float, bool, int]:
        """Better ones first; step times that differ only by rounding are equal."""
        return float(f"{seconds:.9g}"), train.micro_batch != config.train.micro_batch, -train.micro_batch

    show(f"{plural(processes, 'GPU')}: possible meshes")
    rows = [(order(row.config.train, row.seconds), row) for row in candidates(config, processes, hardware, fixed)]
    best: tuple[tuple[float, bool, int], MeshEstimate] | None = None
    smallest = math.inf
    for number, (bound, row) in enumerate(sorted(rows, key=lambda pair: pair[0]), 1):
        if best is not None and bound >= best[0]:
            break
        train, memory = row.config.train, row.memory
        if memory <= USABLE * hardware.memory:
            what = f"micro-batch {train.micro_batch}, recompute {train.recompute}"
            show(f"{number:,} of {len(rows):,} at most: {row.mesh.describe()}, {what}")
            result = estimate(row.config, train.engine, row.mesh, hardware)
            assert result.step is not None
            memory, rank = result.peak_memory, order(train, result.step.seconds.total)
            if result.fits(hardware) and (best is None or rank < best[0]):
                best = rank, result
        smallest = min(smallest, memory)
    if best is not None:
        return best[1]
    if not rows:
        raise ConfigError(
            f"train.global_batch={config.train.global_batch} has fewer micro-batches than {processes} GPUs have "
            f"data-parallel ranks, on every mesh: use --set train.global_batch={_enough(config, processes, hardware)}"
            " or more, or fewer GPUs"
        )
    raise ConfigError(
        f"{config.residual.method} does not fit {USABLE:.0%} of {hardware.memory / GIB:g} GiB on any mesh of "
        f"{processes} GPUs: the smallest needs at least {smallest / GIB:.3g} GiB; use more GPUs, or larger ones"
    )


def candidates(config: Config, processes: int, hardware: Hardware, fixed: Set[str]) -> Iterator[Candidate]:
    """Every possible mesh, with every micro-batch that the recipe allows and every kind of recomputation."""
    train, engine = config.train, "single" if processes == 1 else "fsdp2"
    micro_batches = {train.micro_batch}
    if "micro_batch" not in fixed and config.model.moe is None:  # routers balance each micro-batch: part of the recipe
        micro_batches |= {n for n in divisors(train.global_batch) if n <= MAX_MICRO_BATCH}
    for parallel, micro_batch in product(_parallels(config, processes, hardware), sorted(micro_batches)):
        try:
            changed = with_train(config, micro_batch=micro_batch, parallel=parallel, engine=engine)
            mesh = mesh_of(changed, processes)
        except ConfigError:
            continue
        if train.global_batch < micro_batch * mesh.data:
            continue
        ranks = pipeline_ranks(changed, engine, mesh, _minimum_passes(changed, mesh))
        memory = max(map(minimum_memory, ranks))
        for recompute in [train.recompute] if "recompute" in fixed else RECOMPUTE:
            candidate = with_train(changed, recompute=recompute)
            seconds = step_seconds([rank._replace(config=candidate) for rank in ranks], hardware)
            yield Candidate(candidate, mesh, seconds.total, memory)


def with_train(config: Config, **settings: Any) -> Config:
    """The config with other settings of `train`."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **settings))


def _minimum_passes(config: Config, mesh: Mesh) -> Passes:
    """A lower bound from the shapes of the model: nothing is kept, and nothing is sent twice."""
    model, train, cost = config.model, config.train, token_cost(config.model, config.residual)
    width = 2 if train.precision == "bf16" else 4
    stream = train.micro_batch * model.context * model.width * width
    tensor = part_of(stream, mesh.tensor) * (2 if model.moe is None else 1)  # an MoE branch gathers nothing
    rows = part_of(stream // mesh.tensor * model.moe.active, mesh.expert_ranks) if model.moe else 0
    layers = [branches // 2 for branches in cost.branches]
    return Passes(
        shared=0,
        start=Memory(),
        blocks=(Memory(),) * len(layers),
        sent=tuple((4 * tensor * count, 4 * rows * count) for count in layers),  # twice forward, twice backward
        end=Memory(),
        stream=stream // mesh.tensor,
        streams=cost.streams,
        keeps_history=cost.keeps_history,
    )


def _parallels(config: Config, processes: int, hardware: Hardware) -> Iterator[ParallelConfig]:
    """All ways to divide the model; larger tensor groups come last."""
    model, blocks = config.model, block_count(config)
    tensors = [n for n in divisors(math.gcd(model.heads, model.kv_heads)) if n <= hardware.node_size]
    experts = divisors(model.moe.experts) if model.moe else [1]
    for tensor in tensors:
        for pipeline in (n for n in divisors(processes) if n <= blocks):
            for virtual in range(1, min(MAX_VIRTUAL, blocks // pipeline) + 1 if pipeline > 1 else 2):
                for expert in experts:
                    yield ParallelConfig(tensor, pipeline, virtual, expert, sequence_parallel=tensor > 1)


def _enough(config: Config, processes: int, hardware: Hardware) -> int:
    """The smallest global batch with one micro-batch on every data-parallel rank of some mesh."""
    shared = {parallel.tensor * parallel.pipeline for parallel in _parallels(config, processes, hardware)}
    return config.train.micro_batch * min(processes // ranks for ranks in shared if processes % ranks == 0)


def check_memory(planned: MeshEstimate, hardware: Hardware) -> Check:
    """Whether the fullest rank fits, and otherwise the first change that makes it fit."""
    config, ranks = planned.config, planned.mesh.processes
    needed, limit = f"{planned.peak_memory / GIB:.1f} GiB", f"{USABLE:.0%} of {hardware.memory / GIB:g} GiB"
    if hardware.memory == math.inf:
        return Check("memory", "note", f"{needed} on each rank: pass --gpu-memory GIB to compare")
    if planned.fits(hardware):
        return Check("memory", "ok", f"{needed} fits {limit}")
    problem = f"{needed} does not fit {limit}"
    for change, changed, more in _changes(config, ranks):
        try:
            smaller = estimate(changed, engine_or_configured(changed, more), engine_mesh(changed, more), hardware)
        except ConfigError:
            continue
        if not smaller.fits(hardware):
            continue
        remedy = f"use {change}, {smaller.peak_memory / GIB:.1f} GiB"
        # If recomputation alone is enough, the compiler may save as much.
        alone = changed == with_train(config, recompute=changed.train.recompute) and more == ranks
        if config.train.compile != "off" and alone:
            kept = planned.memory[planned.fullest].kept / GIB
            saved = f"train.compile={config.train.compile} keeps fewer activations than the {kept:.1f} GiB counted"
            return Check("memory", "note", f"{problem}, but {saved}; if it fails, {remedy}")
        return Check("memory", "problem", f"{problem}: {remedy}")
    none = "no recomputation, micro-batch or number of GPUs that was tried is enough: use more or larger GPUs"
    return Check("memory", "problem", f"{problem}: {none}")


def check_device_memory(
    config: Config,
    processes: int,
    free: float,
    total: float,
    planned: MeshEstimate | None = None,
    show: Show = silent,
) -> Check:
    """Compare a run with the free and the total memory of a rank's device, without an estimate if there is ample.

    Raises if weights, gradients and optimizer state alone exceed the total, or if the estimate does by far. An estimate
    closer to it is a note.
    """
    engine, mesh = engine_or_configured(config, processes), engine_mesh(config, processes)
    ranks = pipeline_ranks(config, engine, mesh, _minimum_passes(config, mesh))
    each = " of each rank" if processes > 1 else ""
    if (stored := max(map(stored_memory, ranks))) > total:
        raise TrainError(
            f"weights, gradients and optimizer state take {stored / GIB:.1f} GiB, more than the {total / GIB:.1f} GiB "
            f"of memory{each}: use a smaller SCALE, more processes or a larger machine, or use --force"
        )
    if planned is None:
        if max(map(ample_memory, ranks)) <= USABLE * free:
            return Check("memory", "ok", f"{free / GIB:.1f} GiB{each} free, which is ample")
        show("estimating memory")
        planned = estimate(config, engine, mesh, Hardware())
    needed = planned.peak_memory
    comparison = f"about {needed / GIB:.1f} GiB needed, {free / GIB:.1f} of {total / GIB:.1f} GiB{each} free"
    if needed <= USABLE * free:
        return Check("memory", "ok", comparison)
    remedy = "use train.recompute=full, train.micro_batch=1, more processes or a smaller SCALE"
    if needed > FAR_TOO_MUCH * total:
        raise TrainError(f"{comparison}: {remedy}, or use --force")
    return Check("memory", "note", f"{comparison}: if it fails, {remedy}")


def _changes(config: Config, ranks: int) -> Iterator[tuple[str, Config, int]]:
    """Changes that save memory: on the same GPUs, the cheapest in time first; then on more GPUs."""
    steps: list[dict[str, Any]] = [{"engine": "fsdp2"}] if config.train.engine == "ddp" else []
    steps += [{"recompute": kind} for kind in RECOMPUTE[RECOMPUTE.index(config.train.recompute) + 1 :]]
    if config.train.micro_batch > 1 and config.model.moe is None:  # routers balance each micro-batch
        steps.append({"micro_batch": 1})
    settings: dict[str, Any] = {}
    change, smaller = "", config
    for step in steps:
        settings |= step
        change = " with ".join(f"train.{key}={value}" for key, value in reversed(settings.items()))
        smaller = with_train(config, **settings)
        yield change, smaller, ranks
    if config.train.engine == "single":
        return
    for more in (2 * ranks, 4 * ranks, 8 * ranks):
        if smaller.train.global_batch >= smaller.train.micro_batch * more:
            yield " and ".join(filter(None, [change, f"{more} GPUs"])), smaller, more
