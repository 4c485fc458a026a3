"""The plan of a run: what it costs, what it does at every step, what a rank holds, and whether it can start."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from dualres.config.schema import Config, ConfigError
from dualres.model.accounting import Flops, Parameters, flops_per_token, parameters
from dualres.model.activation_checkpointing import Recompute
from dualres.model.decoder import build_decoder
from dualres.parallel.mesh import Mesh
from dualres.parallel.pipeline import micro_batches
from dualres.plan.run_memory import ACTIVATIONS, Part, memory, total
from dualres.train.engines.build import engine_mesh
from dualres.train.preflight import Check, Places, check_start, engine_or_asked
from dualres.train.recipe import learning_rate, steps_of
from dualres.util.progress import short
from dualres.util.tables import table

GIB = 2**30
USABLE = 0.9  # of a GPU's memory: its driver, NCCL and the allocator's fragments have the rest
STRONGER: dict[str, tuple[Recompute, ...]] = {"none": ("selective", "full"), "selective": ("full",), "full": ()}
ESTIMATE = """\
An estimate that no GPU has confirmed. Activations, loss and work were counted by running the model on tensors without
memory, eagerly and with the fused operators: torch.compile keeps less; what kernels need inside, NCCL and the
allocator's fragments are not in it."""


class Batch(NamedTuple):
    """How a step is cut."""

    micro_batch: int  # sequences
    gpus: int
    ranks: int  # that are data-parallel
    accumulation: int  # micro-batches of a rank, with those that fill up a batch that does not divide
    tokens_per_step: int
    steps: int
    tokens: int


class Schedule(NamedTuple):
    """The learning rate. Steps count from 1."""

    warmup_steps: int
    peak: float
    peak_step: int
    minimum: float
    decay: str
    samples: list[tuple[int, float]]


class Plan(NamedTuple):
    """Everything that `dualres train --dry-run` shows."""

    engine: str
    parameters: Parameters
    flops: Flops
    batch: Batch
    schedule: Schedule
    memory: list[Part]
    checks: list[Check]
    launch: str

    @property
    def problems(self) -> list[Check]:
        """What must change first."""
        return [check for check in self.checks if check.state == "problem"]


def make_plan(
    config: Config, ranks: int, places: Places, launch: str, gpu_memory: float | None = None, wandb: bool = False
) -> Plan:
    """The plan for so many GPUs, of so many GiB each."""
    decoder = build_decoder(config.model, config.residual, device="meta")
    count, engine = parameters(decoder), engine_or_asked(config, ranks)
    parts = memory(config, engine, ranks)
    checks = check_start(config, ranks, count.total, places, wandb)
    checks.append(_memory(config, ranks, parts, gpu_memory))
    return Plan(
        engine, count, flops_per_token(decoder), _batch(config, ranks), _schedule(config), parts, checks, launch
    )


def as_data(plan: Plan) -> dict[str, Any]:
    """The plan as plain data."""
    flops = plan.flops
    return {
        "engine": plan.engine,
        "parameters": plan.parameters._asdict(),
        "flops_per_token": {**flops._asdict(), "forward": flops.total, "training": 3 * flops.total},
        "batch": plan.batch._asdict(),
        "schedule": plan.schedule._asdict(),
        "memory": {"parts": [part._asdict() for part in plan.memory], "total": total(plan.memory), "note": ESTIMATE},
        "checks": [check._asdict() for check in plan.checks],
        "launch": plan.launch,
    }


def as_text(plan: Plan, title: str) -> str:
    """The plan for a terminal."""
    count, flops, batch, schedule = plan.parameters, plan.flops, plan.batch, plan.schedule
    held = [*((part.name, f"{part.bytes / GIB:.2f}", part.what) for part in plan.memory)]
    lines = [
        f"{title}: {_number(batch.gpus, 'GPU')} with {plan.engine}; nothing was started",
        "",
        f"parameters            {count.total:,} with vocabulary, {count.total - count.vocabulary:,} without",
        f"  active per token    {count.active:,}",
        f"  residual pathway    {count.residual:,}",
        f"  vocabulary          {count.vocabulary:,}",
        f"flops per token       {short(flops.total)} forward, about {short(3 * flops.total)} in training; "
        f"{3 * flops.total * batch.tokens:.3g} in the whole run",
        f"tokens per step       {batch.tokens_per_step:,}: {_number(batch.ranks, 'rank')} × micro-batch "
        f"{batch.micro_batch} × {batch.accumulation:g} accumulation steps",
        f"steps                 {batch.steps:,}, {batch.tokens:,} tokens in all",
        f"learning rate         {schedule.peak:g} at step {schedule.peak_step:,} after {schedule.warmup_steps:,} of "
        f"warmup, {schedule.decay} decay to {schedule.minimum:g}",
        "",
        table(["step", "learning rate"], [(step, f"{rate:.3e}") for step, rate in schedule.samples]),
        "",
        table(["memory of a rank", "GiB", "what"], [*held, ("total", f"{total(plan.memory) / GIB:.2f}", "")]),
        "",
        ESTIMATE,
        "",
        table(["check", "is", "found"], plan.checks),
        "",
        f"start it with\n  {plan.launch}",
    ]
    return "\n".join(lines)


def _batch(config: Config, ranks: int) -> Batch:
    train = config.train
    tokens, steps = train.global_batch * config.model.context, steps_of(train, config.model.context)
    try:
        mesh = engine_mesh(config, ranks)
    except ConfigError:  # a check says so
        mesh = Mesh(data=ranks)
    accumulation = micro_batches(train.global_batch, train.micro_batch, mesh)
    return Batch(train.micro_batch, ranks, mesh.data, accumulation, tokens, steps, tokens * steps)


def _schedule(config: Config) -> Schedule:
    train, steps = config.train, steps_of(config.train, config.model.context)
    peak = max(1, train.warmup_steps)
    rest = steps - peak
    shown = {1, peak // 2, peak, *(peak + rest * quarter // 4 for quarter in (1, 2, 3, 4))}
    samples = [(step, learning_rate(step - 1, steps, train)) for step in sorted(shown) if 1 <= step <= steps]
    return Schedule(train.warmup_steps, train.learning_rate, peak, train.min_learning_rate, "cosine", samples)


def cut(config: Config, ranks: int) -> bool:
    """Whether so many ranks share the model in other ways than by data."""
    parallel = config.train.parallel
    return engine_or_asked(config, ranks) == "fsdp2" and max(parallel.tensor, parallel.pipeline, parallel.expert) > 1


def _memory(config: Config, ranks: int, parts: list[Part], gpu_memory: float | None) -> Check:
    needed = f"{total(parts) / GIB:.1f} GiB"
    if cut(config, ranks):
        return Check("memory", "note", f"{needed} if all ranks were data-parallel: dualres plan counts this mesh")
    if gpu_memory is None:
        return Check("memory", "note", f"{needed} on each rank: give --gpu-memory GiB to compare")
    limit = USABLE * gpu_memory * GIB
    if total(parts) <= limit:
        return Check("memory", "ok", f"{needed} of {gpu_memory:g} GiB")
    says = f"{needed} do not fit {USABLE:.0%} of {gpu_memory:g} GiB"
    for change, changed, more in _changes(config, ranks):
        smaller = total(memory(changed, engine_or_asked(changed, more), more))
        if smaller > limit:
            continue
        remedy = f"use {change}, {smaller / GIB:.1f} GiB"
        # What recomputation alone can do without, a compiler may.
        alone = dataclasses.replace(config.train, recompute=changed.train.recompute) == changed.train and more == ranks
        if config.train.compile != "off" and alone:
            kept = sum(part.bytes for part in parts if part.name == ACTIVATIONS)
            saved = (
                f"train.compile={config.train.compile} keeps fewer activations than the {kept / GIB:.1f} GiB counted"
            )
            return Check("memory", "note", f"{says}, but {saved}; if it fails, {remedy}")
        return Check("memory", "problem", f"{says}: {remedy}")
    none = "no sharding, recomputation, micro-batch or number of GPUs up to 8 times as many is enough"
    return Check("memory", "problem", f"{says}: {none}")


def _changes(config: Config, ranks: int) -> Iterator[tuple[str, Config, int]]:
    """What makes a rank hold less: on the same GPUs first, the cheapest in time before the others; then on more."""
    steps: list[dict[str, Any]] = [{"engine": "fsdp2"}] if config.train.engine == "ddp" else []
    steps += [{"recompute": recompute} for recompute in STRONGER[config.train.recompute]]
    if config.train.micro_batch > 1 and config.model.moe is None:  # routers balance each micro-batch
        steps.append({"micro_batch": 1})
    settings: dict[str, Any] = {}
    change, least = "", config
    for step in steps:
        settings |= step
        change = " with ".join(f"train.{key}={value}" for key, value in reversed(settings.items()))
        least = dataclasses.replace(config, train=dataclasses.replace(config.train, **settings))
        yield change, least, ranks
    if config.train.engine == "single":
        return
    for more in (2 * ranks, 4 * ranks, 8 * ranks):
        if least.train.global_batch >= least.train.micro_batch * more:
            yield " and ".join(filter(None, [change, f"{more} GPUs"])), least, more


def _number(n: int, one: str) -> str:
    return f"{n} {one}" if n == 1 else f"{n} {one}s"
