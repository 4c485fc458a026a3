"""What a suite found: a row per scale and method, and the paper's loss tables with ours beside them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from dualres.config.loading import load_config
from dualres.config.paper import PrintedLoss
from dualres.model.accounting import parameters
from dualres.model.decoder import build_decoder
from dualres.report.statistics import Estimate, estimate, paired_difference
from dualres.report.suite import BASE, Result
from dualres.util.tables import table

MEANS = "engine", "processes", "device", "threads"  # of a run, in its summary


class Row(NamedTuple):
    """One method at one scale, over its seeds."""

    scale: str
    method: str
    learning_rate: float | None  # of a sweep: the best
    loss: Estimate  # validation, at the end
    difference: Estimate | None  # to the base, paired by seed
    speed: float | None  # tokens/s over the base's
    memory: float | None  # peak, over the base's


def compare(found: Sequence[Result]) -> list[Row]:
    """Rows in the order of the suite; of a learning-rate sweep, each method at its best rate.

    The best has the lowest mean of those with the most seeds: where a seed failed, the others may be the lucky ones.
    """
    rates: dict[tuple[str, str], list[list[Result]]] = {}
    for (scale, method, _), group in _by_rate(found).items():
        rates.setdefault((scale, method), []).append(group)
    best = {key: min(groups, key=lambda group: (-len(group), _loss(group).mean)) for key, groups in rates.items()}
    return [_row(scale, method, group, best.get((scale, BASE))) for (scale, method), group in best.items()]


def sweep(found: Sequence[Result]) -> list[tuple[str, str, float | None, Estimate]]:
    """Every learning rate of every method: scale, method, rate, validation loss."""
    return [(*key, _loss(group)) for key, group in _by_rate(found).items()]


def as_text(rows: Sequence[Row]) -> str:
    """The table for a terminal and for Markdown's code blocks."""
    swept = any(row.learning_rate is not None for row in rows)
    header = ["scale", "method", *(["rate"] if swept else []), "seeds", "validation loss", f"− {BASE}, paired"]
    lines = []
    for row in rows:
        rate = [f"{row.learning_rate:g}"] if swept and row.learning_rate is not None else []
        difference = "" if row.method == BASE or row.difference is None else row.difference.text(sign="+")
        if row.method != BASE and row.difference is not None and row.difference.seeds < row.loss.seeds:
            difference += f" ({row.difference.seeds} of the seeds)"
        ratios = ["" if ratio is None else f"{ratio:.2f}×" for ratio in (row.speed, row.memory)]
        lines.append([row.scale, row.method, *rate, row.loss.seeds, row.loss.text(), difference, *ratios])
    notes = ["Intervals are 95% over seeds; one seed has none."]
    if any(row.speed is not None for row in rows):
        notes.append(
            "Speed and memory are of runs one after the other; empty where engine, processes, device or threads differ."
        )
    if swept:
        notes.append("The rates were chosen by this same loss.")
    if missing := sorted({row.scale for row in rows} - {row.scale for row in rows if row.method == BASE}):
        notes.append(f"No run of {BASE} at {', '.join(missing)} to compare with.")
    return f"{table([*header, 'tokens/s', 'peak memory'], lines)}\n{' '.join(notes)}"


def paper_table(printed: Sequence[PrintedLoss], rows: Sequence[Row], scales: dict[str, str]) -> str:
    """The paper's loss table and ours where there is one; `scales` says which of ours stands for the paper's.

    Parameters are of the model that is run, by its configs, without the vocabulary.
    """
    ours = {(row.scale, row.method): row.loss for row in rows}
    lines = []
    for cell in printed:
        scale = scales.get(cell.scale, cell.scale)
        loss = ours.get((scale, cell.residual))
        config = load_config(scale, cell.residual)
        count = parameters(build_decoder(config.model, config.residual, device="meta"))
        size = count.total - count.vocabulary
        lines.append([cell.name, cell.scale, size, cell.loss, scale, "not run" if loss is None else loss.text()])
    header = ["method", "scale", "parameters", "paper's loss", "run at", "our validation loss"]
    return table(header, lines)


def as_data(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            **row._asdict(),
            "loss": row.loss._asdict(),
            "difference": None if row.difference is None else row.difference._asdict(),
        }
        for row in rows
    ]


def _row(scale: str, method: str, group: Sequence[Result], base: Sequence[Result] | None) -> Row:
    losses = {result.cell.seed: result.summary["validation_loss"] for result in group}
    rate = group[0].cell.learning_rate
    if base is None:
        return Row(scale, method, rate, _loss(group), None, None, None)
    difference = paired_difference(losses, {result.cell.seed: result.summary["validation_loss"] for result in base})
    ratios = [_ratio(group, base, key) for key in ("tokens_per_second", "peak_memory")]
    return Row(scale, method, rate, _loss(group), difference, *ratios)


def _ratio(group: Sequence[Result], base: Sequence[Result], key: str) -> float | None:
    """Of means; none where the runs had other means: one process against two says nothing of the methods."""
    if len({tuple(result.summary.get(name) for name in MEANS) for result in (*group, *base)}) > 1:
        return None
    ours, theirs = ([r.summary[key] for r in results if r.summary[key]] for results in (group, base))
    return (sum(ours) / len(ours)) / (sum(theirs) / len(theirs)) if ours and theirs else None


def _by_rate(found: Sequence[Result]) -> dict[tuple[str, str, float | None], list[Result]]:
    """The seeds of every scale, method and learning rate."""
    groups: dict[tuple[str, str, float | None], list[Result]] = {}
    for result in found:
        key = (result.cell.scale, result.cell.method, result.cell.learning_rate)
        groups.setdefault(key, []).append(result)
    return groups


def _loss(group: Sequence[Result]) -> Estimate:
    return estimate([result.summary["validation_loss"] for result in group])
