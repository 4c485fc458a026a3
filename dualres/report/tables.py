"""Tables of the page: any cells in a box that scrolls by itself, and the comparison of methods."""

from collections.abc import Sequence
from typing import NamedTuple

from dualres.report.comparison import Compared
from dualres.report.html import Markup, code, join, tag
from dualres.report.statistics import Estimate
from dualres.report.suite import BASE

NOTHING = "—"
MINUS = "−"


class Block(NamedTuple):
    """Rows under a heading of their own; the first cell of a row is its name."""

    title: str
    rows: list[list[str]]


def html_table(caption: str, header: Sequence[str], blocks: Sequence[Block]) -> Markup:
    """In a box of its own, so that a wide table never makes the page wide. A block without a title has no heading."""
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in header)))
    bodies = []
    for block in blocks:
        title = tag("tr", tag("th", block.title, colspan=str(len(header)), scope="rowgroup"))
        rows = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in block.rows]
        bodies.append(tag("tbody", *([title] if block.title else []), *rows))
    body = tag("table", tag("caption", caption), head, *bodies)
    return tag("div", body, class_="scroll", tabindex="0", role="region", aria_label=str(caption))


def comparison(compared: Sequence[Compared]) -> Markup:
    """A block per scale, or per setting where a scale has several."""
    places = list(dict.fromkeys(made.group.place for made in compared))
    blocks = [Block(place, [_row(made) for made in compared if made.group.place == place]) for place in places]
    header = ["method", "seeds", "validation loss", join(f"{MINUS}\N{NO-BREAK SPACE}", code(BASE), ", paired by seed")]
    return html_table(
        "Validation loss at the end of training, in nats per token; lower is better",
        [*header, "tokens/s", "peak memory", "parameters"],
        blocks,
    )


def number(value: float) -> str:
    """12345.6 -> '12,346'"""
    return f"{value:,.0f}"


def difference(found: Estimate) -> str:
    """With a sign, and a real minus."""
    return found.text(sign="+").replace("-", MINUS)


def beneath(text: str, small: str) -> Markup:
    """A second line in a cell, where there is one."""
    return join(text, " ", tag("small", small)) if small else join(text)


def _row(made: Compared) -> list[str]:
    row, count = made.row, made.parameters
    loss = row.loss.text()
    memory = None if made.memory is None else f"{number(made.memory / 2**20)} MiB"
    speed = None if made.speed is None else number(made.speed)
    return [
        beneath(code(made.group.residual), made.group.options),
        str(row.loss.seeds),
        tag("b", loss) if made.is_best else loss,
        _difference(made),
        _with_ratio(speed, None if made.is_base else row.speed),
        _with_ratio(memory, None if made.is_base else row.memory),
        beneath(number(count.total), "" if count.active == count.total else f"{number(count.active)} active"),
    ]


def _difference(made: Compared) -> str:
    found = made.row.difference
    if made.is_base:
        return ""
    if found is None:
        return NOTHING
    return beneath(difference(found), f"{found.seeds} of the seeds" if found.seeds < made.row.loss.seeds else "")


def _with_ratio(text: str | None, ratio: float | None) -> str:
    return NOTHING if text is None else beneath(text, "" if ratio is None else f"{ratio:.2f}×")
