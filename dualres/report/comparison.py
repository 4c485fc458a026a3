"""The comparison: one row per method over its seeds, against `standard` and next to the paper's published losses."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dualres.config.loading import load_config
from dualres.config.paper import KV_ABLATION, SIZE_SWEEP, PrintedLoss
from dualres.config.schema import Config
from dualres.model.accounting import Parameters, parameters
from dualres.model.decoder import build_decoder
from dualres.report.runs import BASE, Group
from dualres.report.statistics import Interval, estimate, paired_difference
from dualres.util.tables import table

HARDWARE = "engine", "processes", "device", "threads"  # keys of a summary; speeds are compared only if they are equal
SAME_COLUMN = {"0.5b-vproj": "0.5b"}  # VProj with a narrower feed-forward; the paper lists it under 0.5B


class ComparisonRow(NamedTuple):
    """One method over its seeds."""

    group: Group
    loss: Interval  # validation, at the end of training
    difference: Interval | None  # from the base, paired by seed
    speed: float | None  # tokens/s, mean over seeds
    memory: float | None  # peak in bytes, mean over seeds
    speed_ratio: float | None  # to the base
    memory_ratio: float | None
    is_base: bool
    is_best: bool  # lowest loss among comparable groups, by the printed digits

    @property
    def parameters(self) -> Parameters:
        return count_parameters(self.group.config)

    @property
    def some_seeds(self) -> str:
        """A remark if the base lacks some of the seeds."""
        paired = self.loss.seeds if self.difference is None else self.difference.seeds
        return f"{paired} of the seeds" if paired < self.loss.seeds else ""


class PaperTable(NamedTuple):
    """A loss table of the paper with columns for our runs; a difference is empty for the first row, or if unknown."""

    caption: str
    header: list[str]
    rows: list[tuple[str, str, list[tuple[str, str]]]]  # the paper's name, our residual, losses with differences


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
        if difference and row.some_seeds:
            difference += f" ({row.some_seeds})"
        ratios = ["" if ratio is None else f"{ratio:.2f}×" for ratio in (row.speed_ratio, row.memory_ratio)]
        names = [row.group.scale, row.group.residual, *([row.group.options] if swept else [])]
        lines.append([*names, row.loss.seeds, row.loss.text(), difference, *ratios])
    notes = ["± is the half-width of a 95% confidence interval over seeds; a single seed has none."]
    if any(row.speed_ratio is not None for row in rows):
        notes.append("Speed and memory are of consecutive runs; blank if engine, processes, device or threads differ.")
    if swept:
        notes.append("Learning rates were selected on this same validation loss.")
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


def as_columns(rows: Sequence[ComparisonRow]) -> list[dict[str, Any]]:
    """The rows as flat data for a CSV file, in SI units and bytes."""
    return [
        {
            "setting": row.group.heading,
            "method": row.group.residual,
            "options": row.group.options,
            "seeds": row.loss.seeds,
            "validation_loss": row.loss.mean,
            "validation_loss_ci95": row.loss.half,
            f"minus_{BASE}": None if row.difference is None else row.difference.mean,
            f"minus_{BASE}_ci95": None if row.difference is None else row.difference.half,
            "tokens_per_second": row.speed,
            "peak_memory_bytes": row.memory,
            "parameters": row.parameters.total,
            "active_parameters": row.parameters.active,
        }
        for row in rows
    ]


def paper_as_text(printed: Sequence[PrintedLoss], rows: Sequence[ComparisonRow], scales: Mapping[str, str]) -> str:
    """A loss table of the paper with ours where available; `scales` maps the paper's scales to ours.

    Parameters are those of the model as configured, without the vocabulary.
    """
    ours = {(row.group.scale, row.group.residual): row.loss for row in rows}
    lines = []
    for cell in printed:
        scale = scales.get(cell.scale, cell.scale)
        loss = ours.get((scale, cell.residual))
        count = count_parameters(load_config(scale, cell.residual))
        size = count.total - count.vocabulary
        lines.append([cell.name, cell.scale, size, cell.loss, scale, "not run" if loss is None else loss.text()])
    return table(["method", "scale", "parameters", "paper's loss", "run at", "our validation loss"], lines)


def paper_tables(rows: Sequence[ComparisonRow]) -> list[PaperTable]:
    """The paper's two loss tables, each only if one of its methods was run here."""
    tables = [_side_by_side("size sweep", SIZE_SWEEP, rows), _side_by_side("key–value ablation", KV_ABLATION, rows)]
    return [each for each in tables if each is not None]


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


def _side_by_side(name: str, printed: Sequence[PrintedLoss], compared: Sequence[ComparisonRow]) -> PaperTable | None:
    """A row per method of the paper; every loss with its difference from the first row's."""
    titles = {cell.residual: cell.name for cell in printed}
    base = next(iter(titles))
    theirs = {(cell.residual, SAME_COLUMN.get(cell.scale, cell.scale)): cell.loss for cell in printed}
    ours = {
        (row.group.residual, row.group.heading): row
        for row in compared
        if row.group.residual in titles and row.group.is_shipped
    }
    if not ours:
        return None
    scales, headings = (list(dict.fromkeys(column for _, column in losses)) for losses in (theirs, ours))
    rows = []
    for residual, title in titles.items():
        cells = [_printed(theirs[residual, scale], theirs[base, scale]) for scale in scales]
        cells += [_measured(ours.get((residual, heading)), ours.get((base, heading))) for heading in headings]
        rows.append((title, residual, cells))
    header = ["method", *(f"the paper, {scale}" for scale in scales), *(f"here, {heading}" for heading in headings)]
    caption = f"The paper's {name} and ours: validation loss, with the difference from {titles[base]} below it"
    return PaperTable(caption, header, rows)


def _printed(loss: str, base: str) -> tuple[str, str]:
    difference = float(loss) - float(base)
    return loss, f"{difference:+.3f}" if difference else ""


def _measured(row: ComparisonRow | None, base: ComparisonRow | None) -> tuple[str, str]:
    if row is None:
        return "not run", ""
    difference = None if base is None or base is row else paired_difference(row.group.losses, base.group.losses)
    return row.loss.text(), "" if difference is None else difference.text(sign="+")
