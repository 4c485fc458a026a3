"""The comparison: one row per method over its seeds, against `standard`, as text, JSON and HTML."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from dualres.config.schema import Config
from dualres.model.accounting import Parameters, parameters
from dualres.model.decoder import build_decoder
from dualres.report.groups import BASE, Group
from dualres.report.html import MINUS, NOTHING, Markup, code, join, signed, tag, two_lines
from dualres.report.html import table as html_table
from dualres.report.statistics import Interval, estimate, paired_difference
from dualres.util.tables import table

HARDWARE = "engine", "processes", "device", "threads"  # keys of a summary; speeds are compared only if they are equal


class ComparisonRow(NamedTuple):
    """One method over its seeds."""

    group: Group
    loss: Interval  # validation, at the end of training
    difference: Interval | None  # to the base, paired by seed
    speed: float | None  # tokens/s, mean over seeds
    memory: float | None  # peak in bytes, mean over seeds
    speed_ratio: float | None  # to the base
    memory_ratio: float | None
    is_base: bool
    is_best: bool  # lowest loss among comparable groups, by the printed digits


def compare(groups: Sequence[Group]) -> list[ComparisonRow]:
    """A row per group with a finished run, compared with groups that differ only in their residual."""
    finished = [group for group in groups if group.finished]
    return [
        _row(group, [other for other in finished if (other.scale, other.setting) == (group.scale, group.setting)])
        for group in finished
    ]


def best_rates(groups: Sequence[Group]) -> list[Group]:
    """Each method of a learning-rate sweep at its best rate: the lowest mean among the rates with the most seeds.

    Rates with failed seeds are not considered: the remaining seeds may be the lucky ones.
    """
    rates: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        rates.setdefault((group.scale, group.residual), []).append(group)
    return [min(each, key=lambda group: (-len(group.finished), mean_loss(group).mean)) for each in rates.values()]


def mean_loss(group: Group) -> Interval:
    return estimate([*group.losses.values()])


def count_parameters(config: Config) -> Parameters:
    return parameters(build_decoder(config.model, config.residual, device="meta"))


def as_text(rows: Sequence[ComparisonRow]) -> str:
    """The table for a terminal; the `options` of a suite's groups are their learning rates."""
    swept = any(row.group.options for row in rows)
    header = ["scale", "method", *(["rate"] if swept else []), "seeds", "validation loss", f"− {BASE}, paired"]
    lines = []
    for row in rows:
        difference = "" if row.is_base or row.difference is None else row.difference.text(sign="+")
        if difference and (some := _some_seeds(row)):
            difference += f" ({some})"
        ratios = ["" if ratio is None else f"{ratio:.2f}×" for ratio in (row.speed_ratio, row.memory_ratio)]
        names = [row.group.scale, row.group.residual, *([row.group.options] if swept else [])]
        lines.append([*names, row.loss.seeds, row.loss.text(), difference, *ratios])
    notes = ["Intervals are 95% over seeds; one seed has none."]
    if any(row.speed_ratio is not None for row in rows):
        notes.append(
            "Speed and memory are of runs one after another; empty if engine, processes, device or threads differ."
        )
    if swept:
        notes.append("The rates were chosen by this same loss.")
    if missing := sorted({row.group.scale for row in rows} - {row.group.scale for row in rows if row.is_base}):
        notes.append(f"No run of {BASE} at {', '.join(missing)} to compare with.")
    return f"{table([*header, 'tokens/s', 'peak memory'], lines)}\n{' '.join(notes)}"


def as_data(rows: Sequence[ComparisonRow]) -> list[dict[str, Any]]:
    """The rows as JSON data."""
    return [
        {
            "scale": row.group.scale,
            "method": row.group.residual,
            "learning_rate": row.group.config.train.learning_rate,
            "loss": row.loss._asdict(),
            "difference": None if row.difference is None else row.difference._asdict(),
            "speed": row.speed_ratio,
            "memory": row.memory_ratio,
        }
        for row in rows
    ]


def as_html(rows: Sequence[ComparisonRow]) -> Markup:
    """A row group per scale, or per setting where a scale has several."""
    groups: dict[str, list[list[str]]] = {}
    for row in rows:
        groups.setdefault(row.group.heading, []).append(_cells(row))
    difference = join(f"{MINUS}\N{NO-BREAK SPACE}", code(BASE), ", paired by seed")
    return html_table(
        "Validation loss at the end of training, in nats per token; lower is better",
        ["method", "seeds", "validation loss", difference, "tokens/s", "peak memory", "parameters"],
        groups,
    )


def _row(group: Group, comparable: Sequence[Group]) -> ComparisonRow:
    base = next((other for other in comparable if other.is_standard), None)
    loss, printed = mean_loss(group), {f"{mean_loss(other).mean:.4f}" for other in comparable}
    return ComparisonRow(
        group,
        loss,
        None if base is None else paired_difference(group.losses, base.losses),
        _mean(group, "tokens_per_second"),
        _mean(group, "peak_memory"),
        None if base is None else _ratio(group, base, "tokens_per_second"),
        None if base is None else _ratio(group, base, "peak_memory"),
        group is base,
        len(comparable) > 1 and f"{loss.mean:.4f}" == min(printed, key=float),
    )


def _mean(group: Group, key: str) -> float | None:
    values = [run.summary[key] for run in group.finished if run.summary and run.summary[key]]
    return sum(values) / len(values) if values else None


def _ratio(group: Group, base: Group, key: str) -> float | None:
    """The ratio of means; None on different hardware, which would say nothing about the methods."""
    used = {tuple((run.summary or {}).get(name) for name in HARDWARE) for run in (*group.finished, *base.finished)}
    ours, theirs = _mean(group, key), _mean(base, key)
    return None if len(used) > 1 or ours is None or theirs is None else ours / theirs


def _cells(row: ComparisonRow) -> list[str]:
    count, loss, difference = count_parameters(row.group.config), row.loss.text(), NOTHING
    if row.difference is not None:
        difference = two_lines(signed(row.difference), _some_seeds(row))
    memory = None if row.memory is None else f"{row.memory / 2**20:,.0f} MiB"
    return [
        two_lines(code(row.group.residual), row.group.options),
        str(row.loss.seeds),
        tag("b", loss) if row.is_best else loss,
        "" if row.is_base else difference,
        _with_ratio(None if row.speed is None else f"{row.speed:,.0f}", None if row.is_base else row.speed_ratio),
        _with_ratio(memory, None if row.is_base else row.memory_ratio),
        two_lines(f"{count.total:,}", "" if count.active == count.total else f"{count.active:,} active"),
    ]


def _some_seeds(row: ComparisonRow) -> str:
    """A remark if the base lacks some of the seeds."""
    paired = row.loss.seeds if row.difference is None else row.difference.seeds
    return f"{paired} of the seeds" if paired < row.loss.seeds else ""


def _with_ratio(text: str | None, ratio: float | None) -> str:
    return NOTHING if text is None else two_lines(text, "" if ratio is None else f"{ratio:.2f}×")
