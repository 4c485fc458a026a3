"""The paper's published losses, called the paper's, beside ours at our scale."""

from collections.abc import Sequence

from dualres.config.paper import KV_ABLATION, SIZE_SWEEP, PrintedLoss
from dualres.report.comparison import Compared
from dualres.report.groups import Group
from dualres.report.html import Markup, code
from dualres.report.statistics import paired_difference
from dualres.report.tables import MINUS, Block, beneath, difference, html_table

ONE_COLUMN = {"0.5b-vproj": "0.5b"}  # a narrower feed-forward pays for the maps of VProj: the paper has one 0.5B


def paper_losses(compared: Sequence[Compared]) -> list[Markup]:
    """Its two loss tables, each where one of its methods was run here."""
    made = [_beside("size sweep", SIZE_SWEEP, compared), _beside("key–value ablation", KV_ABLATION, compared)]
    return [table for table in made if table is not None]


def _beside(name: str, printed: Sequence[PrintedLoss], compared: Sequence[Compared]) -> Markup | None:
    """A row per method of the paper, every loss with its difference to that of the first row."""
    titles = {cell.residual: cell.name for cell in printed}
    base = next(iter(titles))
    theirs = {(cell.residual, ONE_COLUMN.get(cell.scale, cell.scale)): cell.loss for cell in printed}
    ours = {
        (made.group.residual, made.group.place): made
        for made in compared
        if made.group.residual in titles and made.group.is_shipped
    }
    if not ours:
        return None
    scales, places = (list(dict.fromkeys(place for _, place in found)) for found in (theirs, ours))
    rows = []
    for residual, title in titles.items():
        cells = [_printed(theirs[residual, scale], theirs[base, scale]) for scale in scales]
        cells += [_measured(ours.get((residual, place)), ours.get((base, place))) for place in places]
        rows.append([beneath(title, code(residual)), *cells])
    header = ["method", *(f"the paper, {scale}" for scale in scales), *(f"here, {place}" for place in places)]
    caption = f"The paper's {name}, and ours: validation loss, beneath it the difference to {titles[base]}"
    return html_table(caption, header, [Block("", rows)])


def _printed(loss: str, base: str) -> str:
    apart = float(loss) - float(base)
    return beneath(loss, f"{apart:+.3f}".replace("-", MINUS) if apart else "")


def _measured(made: Compared | None, base: Compared | None) -> str:
    if made is None:
        return "not run"
    apart = None if base is None or base is made else paired_difference(_losses(made.group), _losses(base.group))
    return beneath(made.row.loss.text(), "" if apart is None else difference(apart))


def _losses(group: Group) -> dict[int, float]:
    return {run.seed: run.summary["validation_loss"] for run in group.finished if run.summary is not None}
