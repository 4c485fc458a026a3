"""The comparison: validation loss with its interval, the paired difference to `standard`, speed, memory, parameters."""

from collections.abc import Sequence
from typing import NamedTuple

from dualres.model.accounting import Parameters, parameters
from dualres.model.decoder import build_decoder
from dualres.report import suite_tables
from dualres.report.groups import Group
from dualres.report.runs import Run
from dualres.report.suite import BASE, Cell, Result
from dualres.report.suite_tables import Row


class Compared(NamedTuple):
    """A group with what it reached."""

    group: Group
    row: Row
    speed: float | None  # tokens/s, mean over seeds
    memory: float | None  # peak bytes, mean over seeds
    parameters: Parameters
    is_base: bool  # the others of its scale and setting are compared with it
    is_best: bool  # of them, by the printed digits


def compare_groups(groups: Sequence[Group]) -> list[Compared]:
    """Those with a finished run. Only groups that differ in nothing but their residual are held against each other."""
    left = [group for group in groups if group.finished]
    found: dict[int, Compared] = {}
    for first in left:
        alike = [group for group in left if group.scale == first.scale and group.setting == first.setting]
        if alike[0] is first:
            found.update({id(made.group): made for made in _compare(alike)})
    return [found[id(group)] for group in left]


def _compare(groups: Sequence[Group]) -> list[Compared]:
    """Groups of one scale and setting; the first `standard` is the base."""
    base = next((group for group in groups if group.is_standard), None)
    names = [BASE if group is base else str(number) for number, group in enumerate(groups)]
    results = [
        Result(Cell(group.scale, name, run.seed, None), run.summary or {}, run.training, run.validation)
        for name, group in zip(names, groups, strict=True)
        for run in group.finished
    ]
    rows = suite_tables.compare(results)
    printed = [f"{row.loss.mean:.4f}" for row in rows]
    lowest = min(printed, key=float) if len(rows) > 1 else None
    return [
        Compared(
            group,
            row._replace(method=group.method),
            _mean(group.finished, "tokens_per_second"),
            _mean(group.finished, "peak_memory"),
            parameters(build_decoder(group.config.model, group.config.residual, device="meta")),
            group is base,
            text == lowest,
        )
        for group, row, text in zip(groups, rows, printed, strict=True)
    ]


def _mean(runs: Sequence[Run], key: str) -> float | None:
    values = [run.summary[key] for run in runs if run.summary and run.summary.get(key)]
    return sum(values) / len(values) if values else None
