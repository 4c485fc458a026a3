"""The fastest mesh that fits, and what to change where a plan does not fit.

Meshes are visited in the order of a lower bound of their seconds: when the bound of the next is above the time of the
best one so far, that is the best of all.
"""

import dataclasses
import math
from collections.abc import Iterator, Set
from itertools import product
from typing import Any, NamedTuple

from dualres.config.schema import Config, ConfigError, ParallelConfig, TrainConfig
from dualres.config.validation import divisors
from dualres.model.activation_checkpointing import Recompute
from dualres.parallel.mesh import Mesh, block_count, mesh_of
from dualres.plan.activations import Memory, Passes
from dualres.plan.estimate import MeshEstimate, estimate
from dualres.plan.hardware import GIB, USABLE, Hardware
from dualres.plan.local_model import part_of
from dualres.plan.memory import least_memory
from dualres.plan.stages import pipeline_ranks
from dualres.plan.time import step_seconds, token_cost
from dualres.train.engines.build import engine_mesh
from dualres.train.preflight import Check, engine_or_configured
from dualres.util.progress import Show, plural, silent

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")  # from fast to small
MOST_VIRTUAL = 4
MOST_MICRO_BATCH = 8  # sequences, of a dense model


class Candidate(NamedTuple):
    """A config that names its mesh, with lower bounds."""

    config: Config
    mesh: Mesh
    seconds: float
    memory: int


def choose(
    config: Config, processes: int, hardware: Hardware, fixed: Set[str] = frozenset(), show: Show = silent
) -> MeshEstimate:
    """The fastest that fits `USABLE` of a GPU; an error says what the smallest would need.

    Of equally fast ones, that with the recipe's micro-batch, else with the largest. `fixed` settings of `train`, of
    micro_batch and recompute, stay as they are.
    """

    def order(train: TrainConfig, seconds: float) -> tuple[float, bool, int]:
        """Better ones first; seconds that differ by rounding are equal."""
        return float(f"{seconds:.9g}"), train.micro_batch != config.train.micro_batch, -train.micro_batch

    show(f"{plural(processes, 'GPU')}: possible meshes")
    found = [(order(row.config.train, row.seconds), row) for row in candidates(config, processes, hardware, fixed)]
    best: tuple[tuple[float, bool, int], MeshEstimate] | None = None
    least = math.inf
    for number, (bound, row) in enumerate(sorted(found, key=lambda pair: pair[0]), 1):
        if best is not None and bound >= best[0]:
            break
        train, held = row.config.train, row.memory
        if held <= USABLE * hardware.memory:
            what = f"micro-batch {train.micro_batch}, recompute {train.recompute}"
            show(f"{number:,} of {len(found):,} at most: {row.mesh.describe()}, {what}")
            made = estimate(row.config, train.engine, row.mesh, hardware)
            assert made.step is not None
            held, place = made.peak_memory, order(train, made.step.seconds.total)
            if made.fits(hardware) and (best is None or place < best[0]):
                best = place, made
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


def candidates(config: Config, processes: int, hardware: Hardware, fixed: Set[str]) -> Iterator[Candidate]:
    """Every possible mesh with every micro-batch that the recipe allows and every recomputation."""
    train, engine = config.train, "single" if processes == 1 else "fsdp2"
    micro_batches = {train.micro_batch}
    if "micro_batch" not in fixed and config.model.moe is None:  # a router balances its micro-batch: part of the recipe
        micro_batches |= {n for n in divisors(train.global_batch) if n <= MOST_MICRO_BATCH}
    for parallel, micro_batch in product(_parallels(config, processes, hardware), sorted(micro_batches)):
        try:
            cut = with_train(config, micro_batch=micro_batch, parallel=parallel, engine=engine)
            mesh = mesh_of(cut, processes)
        except ConfigError:
            continue
        if train.global_batch < micro_batch * mesh.data:
            continue
        ranks = pipeline_ranks(cut, engine, mesh, _least_passes(cut, mesh))
        held = max(map(least_memory, ranks))
        for recompute in [train.recompute] if "recompute" in fixed else RECOMPUTE:
            candidate = with_train(cut, recompute=recompute)
            seconds = step_seconds([rank._replace(config=candidate) for rank in ranks], hardware)
            yield Candidate(candidate, mesh, seconds.total, held)


def with_train(config: Config, **settings: Any) -> Config:
    """The config with other settings of `train`."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **settings))


def _least_passes(config: Config, mesh: Mesh) -> Passes:
    """What must be sent, by the shapes of the model: no byte is kept, and nothing is sent again."""
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
    """Larger tensor groups come last."""
    model, blocks = config.model, block_count(config)
    tensors = [n for n in divisors(math.gcd(model.heads, model.kv_heads)) if n <= hardware.node_size]
    experts = divisors(model.moe.experts) if model.moe else [1]
    for tensor in tensors:
        for pipeline in (n for n in divisors(processes) if n <= blocks):
            for virtual in range(1, min(MOST_VIRTUAL, blocks // pipeline) + 1 if pipeline > 1 else 2):
                for expert in experts:
                    yield ParallelConfig(tensor, pipeline, virtual, expert, sequence_parallel=tensor > 1)


def _enough(config: Config, processes: int, hardware: Hardware) -> int:
    """Sequences for one micro-batch on every data-parallel rank of the deepest and widest mesh."""
    shared = {parallel.tensor * parallel.pipeline for parallel in _parallels(config, processes, hardware)}
    return config.train.micro_batch * min(processes // ranks for ranks in shared if processes % ranks == 0)


def check_memory(made: MeshEstimate, hardware: Hardware) -> Check:
    """Whether the rank that holds most fits, and otherwise the first change that makes it fit."""
    config, ranks = made.config, made.mesh.processes
    needed, limit = f"{made.peak_memory / GIB:.1f} GiB", f"{USABLE:.0%} of {hardware.memory / GIB:g} GiB"
    if hardware.memory == math.inf:
        return Check("memory", "note", f"{needed} on each rank: give --gpu-memory GIB to compare")
    if made.fits(hardware):
        return Check("memory", "ok", f"{needed} fits {limit}")
    found = f"{needed} does not fit {limit}"
    for change, changed, more in _changes(config, ranks):
        try:
            smaller = estimate(changed, engine_or_configured(changed, more), engine_mesh(changed, more), hardware)
        except ConfigError:
            continue
        if not smaller.fits(hardware):
            continue
        remedy = f"use {change}, {smaller.peak_memory / GIB:.1f} GiB"
        # What recomputation alone can save, a compiler may save too.
        alone = changed == with_train(config, recompute=changed.train.recompute) and more == ranks
        if config.train.compile != "off" and alone:
            kept = made.memory[made.fullest].kept / GIB
            saved = f"train.compile={config.train.compile} keeps fewer activations than the {kept:.1f} GiB counted"
            return Check("memory", "note", f"{found}, but {saved}; if it fails, {remedy}")
        return Check("memory", "problem", f"{found}: {remedy}")
    none = "no sharding, recomputation, micro-batch or number of GPUs up to 8 times as many is enough"
    return Check("memory", "problem", f"{found}: {none}")


def _changes(config: Config, ranks: int) -> Iterator[tuple[str, Config, int]]:
    """What makes a rank hold less: on the same GPUs, the cheapest in time first; then on more."""
    steps: list[dict[str, Any]] = [{"engine": "fsdp2"}] if config.train.engine == "ddp" else []
    steps += [{"recompute": how} for how in RECOMPUTE[RECOMPUTE.index(config.train.recompute) + 1 :]]
    if config.train.micro_batch > 1 and config.model.moe is None:  # routers balance each micro-batch
        steps.append({"micro_batch": 1})
    settings: dict[str, Any] = {}
    change, least = "", config
    for step in steps:
        settings |= step
        change = " with ".join(f"train.{key}={value}" for key, value in reversed(settings.items()))
        least = with_train(config, **settings)
        yield change, least, ranks
    if config.train.engine == "single":
        return
    for more in (2 * ranks, 4 * ranks, 8 * ranks):
        if least.train.global_batch >= least.train.micro_batch * more:
            yield " and ".join(filter(None, [change, f"{more} GPUs"])), least, more
