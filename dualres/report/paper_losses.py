"""The paper's published losses next to ours."""

from collections.abc import Mapping, Sequence

from dualres.config.loading import load_config
from dualres.config.paper import KV_ABLATION, SIZE_SWEEP, PrintedLoss
from dualres.report.comparison import ComparisonRow, count_parameters
from dualres.report.html import MINUS, Markup, code, signed, two_lines
from dualres.report.html import table as html_table
from dualres.report.statistics import paired_difference
from dualres.util.tables import table

SAME_COLUMN = {"0.5b-vproj": "0.5b"}  # VProj with a narrower feed-forward; the paper lists it under 0.5B


def as_text(printed: Sequence[PrintedLoss], rows: Sequence[ComparisonRow], scales: Mapping[str, str]) -> str:
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


def as_html(rows: Sequence[ComparisonRow]) -> list[Markup]:
    """The paper's two loss tables, each only if one of its methods was run here."""
    tables = [_side_by_side("size sweep", SIZE_SWEEP, rows), _side_by_side("key–value ablation", KV_ABLATION, rows)]
    return [each for each in tables if each is not None]


def _side_by_side(name: str, printed: Sequence[PrintedLoss], compared: Sequence[ComparisonRow]) -> Markup | None:
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
        rows.append([two_lines(title, code(residual)), *cells])
    header = ["method", *(f"the paper, {scale}" for scale in scales), *(f"here, {heading}" for heading in headings)]
    caption = f"The paper's {name} and ours: validation loss, with the difference from {titles[base]} below it"
    return html_table(caption, header, {"": rows})


def _printed(loss: str, base: str) -> str:
    difference = float(loss) - float(base)
    return two_lines(loss, f"{difference:+.3f}".replace("-", MINUS) if difference else "")


def _measured(row: ComparisonRow | None, base: ComparisonRow | None) -> str:
    if row is None:
        return "not run"
    difference = None if base is None or base is row else paired_difference(row.group.losses, base.group.losses)
    return two_lines(row.loss.text(), "" if difference is None else signed(difference))
