"""The plan that `dualres plan` prints: one mesh, and several residuals on it side by side."""

import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

from dualres.config.schema import Config
from dualres.parallel.mesh import Mesh
from dualres.plan.communication import Sent
from dualres.plan.estimate import Estimate
from dualres.plan.hardware import GIB, USABLE, Hardware
from dualres.plan.memory import WHAT, Memory
from dualres.plan.time import Seconds
from dualres.util.progress import short
from dualres.util.tables import table

NAMES = {"whole_gradients": "whole gradients", "gathered": "gathered weights", "live": "live streams"}
MODEL = """\
This is a model that no GPU has confirmed. Memory is counted on the real modules without weights, eagerly: torch.compile
keeps less; NCCL, kernels' workspaces and the allocator's fragments are not in it. Seconds follow from the stated peaks
and bandwidths: they are for comparing meshes. On small meshes of CPU processes, memory is within 10% of the measured
peak and bytes sent are exact (tests/plan)."""
SENT = {
    "weights": "gathers of sharded weights",
    "gradients": "scatters of their gradients",
    "tensor": "branch inputs and outputs, embedding, loss",
    "experts": "rows to experts and back, uniform routing",
    "pipeline": "states on, gradients of states back",
    "shared": "gradients that several ranks hold whole",
    "control": "the gradient's norm",
}


class Column(NamedTuple):
    """One residual on the mesh, or why it cannot be cut so."""

    residual: str
    estimate: Estimate | None
    problem: str = ""


class Plan(NamedTuple):
    """A mesh for `config`, and several residuals on it."""

    residual: str
    config: Config
    mesh: Mesh
    hardware: Hardware
    chosen: bool
    columns: list[Column]
    launch: str

    @property
    def own(self) -> Estimate:
        """Of the residual that was asked for."""
        (found,) = (column.estimate for column in self.columns if column.residual == self.residual)
        assert found is not None  # what cannot be cut so was refused
        return found

    @property
    def fits(self) -> bool:
        """Whether the residual that was asked for fits."""
        return self.own.fits(self.hardware)


def as_data(plan: Plan) -> dict[str, Any]:
    """The plan as plain data."""
    return {
        "mesh": {**plan.mesh._asdict(), "processes": plan.mesh.processes, "name": plan.mesh.describe()},
        "chosen": plan.chosen,
        "fits": plan.fits,
        "micro_batch": plan.config.train.micro_batch,
        "recompute": plan.config.train.recompute,
        "hardware": plan.hardware._asdict(),
        "residuals": {column.residual: _column_data(column) for column in plan.columns},
        "launch": plan.launch,
        "note": MODEL,
    }


def _column_data(column: Column) -> dict[str, Any]:
    found = column.estimate
    if found is None:
        return {"problem": column.problem}
    return {
        "micro_batches": found.micro_batches,
        "memory": [{**held._asdict(), "total": held.total} for held in found.memory],
        "sent": [{**said._asdict(), "total": said.total} for said in found.sent],
        "pipeline_resent": list(found.resent),
        "seconds": {**found.seconds._asdict(), "total": found.seconds.total},
        "tokens_per_second": found.tokens_per_second,
        "utilisation": found.utilisation,
    }


def as_text(plan: Plan, title: str) -> str:
    """The plan for a terminal."""
    train, mesh, own = plan.config.train, plan.mesh, plan.own
    shown = [column for column in plan.columns if column.estimate is not None]
    how = "chosen, the fastest that fits" if plan.chosen else "as given"
    held = own.memory[own.fullest].total / GIB
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    lines = [
        f"{title} on {mesh.processes:,} {'GPU' if mesh.processes == 1 else 'GPUs'}: {mesh.describe()}, {how}",
        f"{held:.1f} GiB {verdict} {USABLE:.0%} of {plan.hardware.memory / GIB:g} GiB; "
        f"{short(own.tokens_per_second)} tokens/s, {own.utilisation:.0%} of the peak",
        "",
        f"mesh            data {mesh.data} × tensor {mesh.tensor} × pipeline {mesh.pipeline}"
        + (f", {mesh.virtual} chunks on each" if mesh.virtual > 1 else "")
        + (f"; experts over {mesh.expert_ranks} ranks" if mesh.expert_ranks > 1 and plan.config.model.moe else ""),
        f"step            {train.global_batch:,} sequences of {plan.config.model.context:,}: {mesh.data:,} ranks × "
        f"{own.micro_batches} {'micro-batch' if own.micro_batches == 1 else 'micro-batches'} of {train.micro_batch}, "
        f"recompute {train.recompute}",
        f"assumed         {plan.hardware.describe()}",
        "",
        _table("memory of a rank", "GiB", shown, _memory_rows(shown)),
        "",
        _table("sent by a rank in a step", "GB", shown, _sent_rows(shown)),
        "",
        _table("seconds of a step", "s", shown, _second_rows(shown)),
        "",
        *[f"{column.residual} cannot be cut so: {column.problem}" for column in plan.columns if column.problem],
        MODEL,
        "",
        f"start it with\n  {plan.launch}",
    ]
    return "\n".join(lines)


Rows = list[tuple[str, list[str], str]]


def _table(what: str, unit: str, columns: Sequence[Column], rows: Rows) -> str:
    header = [f"{what}, {unit}", *(column.residual for column in columns), "what"]
    return table(header, [(name, *values, words) for name, values, words in rows])


def _memory_rows(columns: Sequence[Column]) -> Rows:
    found = [e.memory[e.fullest] for column in columns if (e := column.estimate)]
    rows = _rows([held._asdict() for held in found], GIB, {k: WHAT[k] for k in Memory._fields})
    rows.append(("total", [f"{held.total / GIB:.2f}" for held in found], ""))
    stages = [e.fullest for column in columns if (e := column.estimate)]
    if any(stages):
        rows.append(("pipeline rank", [str(stage) for stage in stages], "that holds most"))
    return rows


def _sent_rows(columns: Sequence[Column]) -> Rows:
    estimates = [e for column in columns if (e := column.estimate)]
    found = [e.sent[e.loudest] for e in estimates]
    rows = _rows([said._asdict() for said in found], 1e9, {k: SENT[k] for k in Sent._fields})
    rows.append(("total", [f"{said.total / 1e9:.2f}" for said in found], "of the rank that sends most"))
    cached, naive = ([sum(said.pipeline for said in e.sent) for e in estimates], [sum(e.resent) for e in estimates])
    if any(naive):
        rows.append(("whole pipeline", [f"{size / 1e9:.2f}" for size in cached], "its ranks together"))
        rows.append(("  naive", [f"{size / 1e9:.2f}" for size in naive], "if each boundary carried all states again"))
    return rows


def _second_rows(columns: Sequence[Column]) -> Rows:
    found = [e for column in columns if (e := column.estimate)]
    rows = _rows([e.seconds._asdict() for e in found], 1, dict.fromkeys(Seconds._fields, ""), digits=3)
    return [
        *rows,
        ("step", [f"{e.seconds.total:.3f}" for e in found], ""),
        ("tokens/s", [f"{e.tokens_per_second:,.0f}" for e in found], ""),
        ("utilisation, %", [f"{100 * e.utilisation:.1f}" for e in found], "of the peak, by the model's own products"),
    ]


def _rows(found: list[dict[str, Any]], unit: float, what: dict[str, str], digits: int = 2) -> Rows:
    """Those in which anything shows."""
    rows = [
        (NAMES.get(name, name), [f"{values[name] / unit:.{digits}f}" for values in found], words)
        for name, words in what.items()
    ]
    return [row for row in rows if any(float(value) for value in row[1])]


def launch(scale: str, residual: str, config: Config, given: Sequence[str], mesh: Mesh, hardware: Hardware) -> str:
    """The command that starts what was planned: the user's own overrides, then those of the mesh."""
    train, parallel = config.train, config.train.parallel
    settings = {
        "train.engine": train.engine,
        "train.micro_batch": train.micro_batch,
        "train.recompute": train.recompute,
        "train.parallel.tensor": parallel.tensor,
        "train.parallel.sequence_parallel": str(parallel.sequence_parallel).lower(),
        "train.parallel.pipeline": parallel.pipeline,
        "train.parallel.virtual_stages": parallel.virtual_stages,
        "train.parallel.expert": parallel.expert,
    }
    named = {override.partition("=")[0] for override in given}
    words = ["dualres", "train", scale, residual]
    for override in (*given, *(f"{key}={value}" for key, value in settings.items() if key not in named)):
        words += ["--set", override]
    if mesh.processes == 1:
        return shlex.join(words)
    nodes = -(-mesh.processes // hardware.node_size)
    several = ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500"] if nodes > 1 else []
    return shlex.join(["torchrun", *several, "--nproc-per-node", str(mesh.processes // nodes), "-m", *words])
