"""The plan that `dualres plan` and `dualres train --dry-run` print."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

from dualres.config.schema import Config
from dualres.model.decoder import build_decoder
from dualres.parallel.pipeline import micro_batches
from dualres.plan.describe import counts, page
from dualres.plan.estimate import MeshEstimate, StepEstimate
from dualres.plan.hardware import GIB, Hardware
from dualres.train.optimizer import learning_rate
from dualres.train.preflight import Check
from dualres.util.tables import table

NOTE = """\
This is an analytical estimate, not validated on GPUs. Memory is counted by running the real modules on fake tensors,
eagerly: torch.compile keeps less; NCCL, kernel workspaces and allocator fragmentation are not counted. Seconds follow
from the stated peaks and bandwidths and are meant for comparing meshes. On small meshes of CPU processes, memory is
within 10% of the measured peak and the bytes sent are exact."""


class Plan(NamedTuple):
    """One mesh, and one or several residuals on it."""

    residual: str
    columns: Mapping[str, MeshEstimate | str]  # by residual; a string says why it cannot use this mesh
    hardware: Hardware
    chosen: bool
    checks: Sequence[Check]  # the last one is of memory
    launch: str

    @property
    def estimate(self) -> MeshEstimate:
        """The estimate of the requested residual."""
        estimate = self.columns[self.residual]
        assert isinstance(estimate, MeshEstimate)  # an unsuitable mesh was rejected before
        return estimate

    @property
    def problems(self) -> list[Check]:
        return [check for check in self.checks if check.state == "problem"]


def batch(estimate: MeshEstimate) -> dict[str, int]:
    """How a step is divided over GPUs, and the number of steps."""
    config, mesh = estimate.config, estimate.mesh
    return {
        "micro_batch": config.train.micro_batch,
        "gpus": mesh.processes,
        "ranks": mesh.data,
        "accumulation": micro_batches(config.train.global_batch, config.train.micro_batch, mesh),  # with padding
        "tokens_per_step": config.tokens_per_step,
        "steps": config.steps,
        "tokens": config.tokens_per_step * config.steps,
    }


def schedule(config: Config) -> dict[str, Any]:
    """The learning-rate schedule. Steps count from 1."""
    train, steps = config.train, config.steps
    peak = max(1, train.warmup_steps)
    samples = {1, peak // 2, peak, *(peak + (steps - peak) * quarter // 4 for quarter in (1, 2, 3, 4))}
    return {
        "warmup_steps": train.warmup_steps,
        "peak": train.learning_rate,
        "peak_step": peak,
        "minimum": train.min_learning_rate,
        "decay": "cosine",
        "samples": [(step, learning_rate(step - 1, steps, train)) for step in sorted(samples) if 1 <= step <= steps],
    }


def as_data(plan: Plan) -> dict[str, Any]:
    estimate, hardware = plan.estimate, plan.hardware
    return {
        "engine": estimate.engine,
        "mesh": {**estimate.mesh._asdict(), "processes": estimate.mesh.processes, "name": estimate.mesh.describe()},
        "chosen": plan.chosen,
        "fits": estimate.fits(hardware),
        "micro_batch": estimate.config.train.micro_batch,
        "recompute": estimate.config.train.recompute,
        **counts(build_decoder(estimate.config.model, estimate.config.residual, device="meta")),
        "batch": batch(estimate),
        "schedule": schedule(estimate.config),
        "hardware": {**hardware._asdict(), "memory": hardware.memory if hardware.memory < math.inf else None},
        "residuals": {
            name: {"problem": column} if isinstance(column, str) else _column_data(column)
            for name, column in plan.columns.items()
        },
        "checks": [check._asdict() for check in plan.checks],
        "launch": plan.launch,
        "note": NOTE,
    }


def _column_data(estimate: MeshEstimate) -> dict[str, Any]:
    data: dict[str, Any] = {"memory": [{**memory._asdict(), "total": memory.total} for memory in estimate.memory]}
    if (step := estimate.step) is not None:
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
    estimates = {name: column for name, column in plan.columns.items() if isinstance(column, MeshEstimate)}
    steps = {name: column.step for name, column in estimates.items() if column.step is not None}
    tables = [_memory_table(estimates), *([_communication_table(steps), _seconds_table(steps)] if steps else [])]
    checks = table(["check", "state", "details"], plan.checks) if plan.checks[1:] else ""
    return page("plan.txt", **as_data(plan), plan=plan, title=title, tables=tables, table_of_checks=checks)


def _memory_table(estimates: Mapping[str, MeshEstimate]) -> str:
    fullest = {name: estimate.memory[estimate.fullest] for name, estimate in estimates.items()}
    more = [("total", *(f"{memory.total / GIB:.2f}" for memory in fullest.values()), "")]
    if any(estimate.fullest for estimate in estimates.values()):
        more.append(("pipeline rank", *(str(estimate.fullest) for estimate in estimates.values()), "the fullest"))
    return _table("memory per rank, GiB", GIB, 2, fullest, more)


def _communication_table(steps: Mapping[str, StepEstimate]) -> str:
    largest = {name: max(step.communication, key=lambda sent: sent.total) for name, step in steps.items()}
    more = [("total", *(f"{sent.total / 1e9:.2f}" for sent in largest.values()), "on the rank that sends the most")]
    if any(sum(step.resent) for step in steps.values()):
        cached = [sum(sent.pipeline for sent in step.communication) for step in steps.values()]
        naive = [sum(step.resent) for step in steps.values()]
        more.append(("whole pipeline", *(f"{size / 1e9:.2f}" for size in cached), "sum over its ranks"))
        more.append(("  naive", *(f"{size / 1e9:.2f}" for size in naive), "if every boundary resent all states"))
    return _table("sent per rank and step, GB", 1e9, 2, largest, more)


def _seconds_table(steps: Mapping[str, StepEstimate]) -> str:
    more = [
        ("step", *(f"{step.seconds.total:.3f}" for step in steps.values()), ""),
        ("tokens/s", *(f"{step.tokens_per_second:,.0f}" for step in steps.values()), ""),
        ("utilization, %", *(f"{100 * step.utilization:.1f}" for step in steps.values()), "of peak, by matmuls"),
    ]
    return _table("time per step, s", 1, 3, {name: step.seconds for name, step in steps.items()}, more)


def _table(title: str, unit: float, digits: int, columns: Mapping[str, Any], more: Sequence[Any]) -> str:
    """A column per residual, a row per field that does not print as zero everywhere, and more rows."""
    rows = []
    for field, hint in get_type_hints(type(next(iter(columns.values()))), include_extras=True).items():
        values = [f"{getattr(each, field) / unit:.{digits}f}" for each in columns.values()]
        if any(map(float, values)):
            rows.append((field.replace("_", " "), *values, *getattr(hint, "__metadata__", [""])))
    return table([title, *columns, "what"], [*rows, *more])
