"""The plan that `dualres plan` and `dualres train --dry-run` print."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

from dualres.config.schema import Config
from dualres.model.decoder import build_decoder
from dualres.parallel.pipeline import micro_batches
from dualres.plan.describe import counts, parameter_lines
from dualres.plan.estimate import MeshEstimate, StepEstimate
from dualres.plan.hardware import GIB, Hardware
from dualres.train.preflight import Check
from dualres.train.recipe import learning_rate, steps_of
from dualres.util.progress import plural, short
from dualres.util.tables import table

NOTE = """\
This is an analytical estimate, not validated on GPUs. Memory is counted by running the real modules on fake tensors,
eagerly: torch.compile keeps less; NCCL, workspaces of kernels and allocator fragmentation are not counted. Seconds
follow from the stated peaks and bandwidths: they are for comparing meshes. On small meshes of CPU processes, memory is
within 10% of the measured peak and the bytes sent are exact."""


class Plan(NamedTuple):
    """One mesh, and one or several residuals on it."""

    residual: str
    columns: Mapping[str, MeshEstimate | str]  # by residual; a string says why this mesh cannot divide it
    hardware: Hardware
    chosen: bool
    checks: Sequence[Check]  # the last is of memory
    launch: str

    @property
    def own(self) -> MeshEstimate:
        """Of the residual that was asked for."""
        found = self.columns[self.residual]
        assert isinstance(found, MeshEstimate)  # a mesh that cannot divide it was refused
        return found

    @property
    def problems(self) -> list[Check]:
        return [check for check in self.checks if check.state == "problem"]


def batch(made: MeshEstimate) -> dict[str, int]:
    """How a step is divided, and how many there are."""
    config, mesh = made.config, made.mesh
    tokens, steps = config.train.global_batch * config.model.context, steps_of(config.train, config.model.context)
    return {
        "micro_batch": config.train.micro_batch,
        "gpus": mesh.processes,
        "ranks": mesh.data,
        "accumulation": micro_batches(config.train.global_batch, config.train.micro_batch, mesh),  # with padding
        "tokens_per_step": tokens,
        "steps": steps,
        "tokens": tokens * steps,
    }


def schedule(config: Config) -> dict[str, Any]:
    """The learning rate. Steps count from 1."""
    train, steps = config.train, steps_of(config.train, config.model.context)
    peak = max(1, train.warmup_steps)
    shown = {1, peak // 2, peak, *(peak + (steps - peak) * quarter // 4 for quarter in (1, 2, 3, 4))}
    return {
        "warmup_steps": train.warmup_steps,
        "peak": train.learning_rate,
        "peak_step": peak,
        "minimum": train.min_learning_rate,
        "decay": "cosine",
        "samples": [(step, learning_rate(step - 1, steps, train)) for step in sorted(shown) if 1 <= step <= steps],
    }


def as_data(plan: Plan) -> dict[str, Any]:
    """The plan as plain data."""
    own, hardware = plan.own, plan.hardware
    return {
        "engine": own.engine,
        "mesh": {**own.mesh._asdict(), "processes": own.mesh.processes, "name": own.mesh.describe()},
        "chosen": plan.chosen,
        "fits": own.fits(hardware),
        "micro_batch": own.config.train.micro_batch,
        "recompute": own.config.train.recompute,
        **counts(build_decoder(own.config.model, own.config.residual, device="meta")),
        "batch": batch(own),
        "schedule": schedule(own.config),
        "hardware": {**hardware._asdict(), "memory": hardware.memory if hardware.memory < math.inf else None},
        "residuals": {
            name: {"problem": made} if isinstance(made, str) else _column_data(made)
            for name, made in plan.columns.items()
        },
        "checks": [check._asdict() for check in plan.checks],
        "launch": plan.launch,
        "note": NOTE,
    }


def _column_data(made: MeshEstimate) -> dict[str, Any]:
    data: dict[str, Any] = {"memory": [{**held._asdict(), "total": held.total} for held in made.memory]}
    if (step := made.step) is not None:
        data |= {
            "communication": [{**sent._asdict(), "total": sent.total} for sent in step.communication],
            "pipeline_resent": list(step.resent),
            "seconds": {**step.seconds._asdict(), "total": step.seconds.total},
            "tokens_per_second": step.tokens_per_second,
            "utilization": step.utilization,
        }
    return data


def as_text(plan: Plan, title: str) -> str:
    """The plan for a terminal."""
    own = plan.own
    mesh, train, context, data = own.mesh, own.config.train, own.config.model.context, as_data(plan)
    flops, found, rates = data["flops_per_token"], data["batch"], data["schedule"]
    how = "chosen, the fastest that fits" if plan.chosen else "as given"
    made = {name: column for name, column in plan.columns.items() if isinstance(column, MeshEstimate)}
    steps = {name: column.step for name, column in made.items() if column.step is not None}
    speed = [f"{short(s.tokens_per_second)} tokens/s, {s.utilization:.0%} of the peak" for s in [own.step] if s]
    ranks = f"{plural(mesh.data, 'rank')} × {plural(found['accumulation'], 'micro-batch', 'es')} of {train.micro_batch}"
    lines = [
        f"{title} on {plural(mesh.processes, 'GPU')}: {mesh.describe()} with {own.engine}, {how}",
        "; ".join([plan.checks[-1].says, *speed]),
        "",
        *parameter_lines(data["parameters"]),
        f"  vocabulary          {data['parameters']['vocabulary']:,}",
        f"flops per token       {short(flops['forward'])} forward, about {short(flops['training'])} in training; "
        f"{flops['training'] * found['tokens']:.3g} in the whole run",
        f"mesh                  data {mesh.data} × tensor {mesh.tensor} × pipeline {mesh.pipeline}"
        + (f", {mesh.virtual} chunks on each" if mesh.virtual > 1 else "")
        + (f"; experts over {mesh.expert_ranks} ranks" if mesh.expert_ranks > 1 and own.config.model.moe else ""),
        f"tokens per step       {found['tokens_per_step']:,} in {train.global_batch:,} sequences of {context:,}: "
        f"{ranks}, recompute {train.recompute}",
        f"steps                 {found['steps']:,}, {found['tokens']:,} tokens in all",
        f"learning rate         {rates['peak']:g} at step {rates['peak_step']:,} after {rates['warmup_steps']:,} of "
        f"warmup, {rates['decay']} decay to {rates['minimum']:g}",
        f"  at step             {', '.join(f'{step:,}: {rate:.3e}' for step, rate in rates['samples'])}",
        *([f"assumed               {plan.hardware.describe()}"] if steps else []),
        "",
        _memory_table(made),
        "",
        *([_communication_table(steps), "", _seconds_table(steps), ""] if steps else []),
        *[f"{name} cannot be divided so: {problem}" for name, problem in plan.columns.items() if name not in made],
        NOTE,
        "",
        *([table(["check", "state", "found"], plan.checks), ""] if plan.checks[1:] else []),
        f"start it with\n  {plan.launch}",
    ]
    return "\n".join(lines)


def _memory_table(made: Mapping[str, MeshEstimate]) -> str:
    fullest = {name: column.memory[column.fullest] for name, column in made.items()}
    more = [("total", *(f"{held.total / GIB:.2f}" for held in fullest.values()), "")]
    if any(column.fullest for column in made.values()):
        more.append(("pipeline rank", *(str(column.fullest) for column in made.values()), "that holds most"))
    return _table("memory of a rank, GiB", GIB, 2, fullest, more)


def _communication_table(steps: Mapping[str, StepEstimate]) -> str:
    most = {name: max(step.communication, key=lambda sent: sent.total) for name, step in steps.items()}
    more = [("total", *(f"{sent.total / 1e9:.2f}" for sent in most.values()), "of the rank that sends most")]
    if any(sum(step.resent) for step in steps.values()):
        cached = [sum(sent.pipeline for sent in step.communication) for step in steps.values()]
        naive = [sum(step.resent) for step in steps.values()]
        more.append(("whole pipeline", *(f"{size / 1e9:.2f}" for size in cached), "its ranks together"))
        more.append(("  naive", *(f"{size / 1e9:.2f}" for size in naive), "if each boundary carried all states again"))
    return _table("sent by a rank in a step, GB", 1e9, 2, most, more)


def _seconds_table(steps: Mapping[str, StepEstimate]) -> str:
    more = [
        ("step", *(f"{step.seconds.total:.3f}" for step in steps.values()), ""),
        ("tokens/s", *(f"{step.tokens_per_second:,.0f}" for step in steps.values()), ""),
        ("utilization, %", *(f"{100 * step.utilization:.1f}" for step in steps.values()), "of the peak, by products"),
    ]
    return _table("seconds of a step, s", 1, 3, {name: step.seconds for name, step in steps.items()}, more)


def _table(title: str, unit: float, digits: int, columns: Mapping[str, Any], more: Sequence[Any]) -> str:
    """A column per residual, a row per field that is not zero everywhere as printed, and more rows."""
    rows = []
    for field, hint in get_type_hints(type(next(iter(columns.values()))), include_extras=True).items():
        values = [f"{getattr(each, field) / unit:.{digits}f}" for each in columns.values()]
        if any(map(float, values)):
            rows.append((field.replace("_", " "), *values, *getattr(hint, "__metadata__", [""])))
    return table([title, *columns, "what"], [*rows, *more])
