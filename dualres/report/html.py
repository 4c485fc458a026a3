"""HTML that is escaped by construction: text becomes markup only through `tag` or `fill`, which escape it."""

import base64
import html
import json
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dualres.report.statistics import Interval

TEMPLATES = Path(__file__).parent / "templates"
NOTHING, MINUS = "—", "−"
_VOID = {"meta", "link", "img"}  # elements without an end tag


class Markup(str):
    """Text that is already HTML."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str) -> Markup:
    """An element; `class_` stands for class, and `_` within a name for a hyphen."""
    written = "".join(f' {key.rstrip("_").replace("_", "-")}="{html.escape(v)}"' for key, v in attributes.items())
    return Markup(f"<{name}{written}>" if name in _VOID else f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: str, between: str = "") -> Markup:
    """Concatenate; plain text is escaped."""
    return Markup(between.join(child if isinstance(child, Markup) else html.escape(child) for child in children))


def fill(name: str, /, **values: str) -> Markup:
    """A file of `templates/` with its $placeholders replaced."""
    template = string.Template(read_template(f"{name}.html"))
    return Markup(template.substitute({key: join(value) for key, value in values.items()}))


def read_template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def code(text: str) -> Markup:
    return tag("code", text)


def notes(texts: Sequence[str]) -> Markup:
    """A list of remarks, or nothing."""
    return tag("ul", *(tag("li", text) for text in texts), class_="notes") if texts else Markup()


def two_lines(text: str, small: str) -> Markup:
    """A cell with an optional second line."""
    return join(text, " ", tag("small", small)) if small else join(text)


def signed(interval: Interval) -> str:
    """The interval with a sign and a typographic minus."""
    return interval.text(sign="+").replace("-", MINUS)


def table(caption: str, header: Sequence[str], groups: Mapping[str, Sequence[Sequence[str]]]) -> Markup:
    """Rows by heading, which may be empty; the first cell of a row is its name.

    The table is in a box that scrolls by itself, so that a wide one never widens the page.
    """
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in header)))
    bodies = []
    for heading, rows in groups.items():
        title = tag("tr", tag("th", heading, colspan=str(len(header)), scope="rowgroup"))
        lines = [tag("tr", tag("th", name, scope="row"), *(tag("td", cell) for cell in cells)) for name, *cells in rows]
        bodies.append(tag("tbody", *([title] if heading else []), *lines))
    body = tag("table", tag("caption", caption), head, *bodies)
    return tag("div", body, class_="scroll", tabindex="0", role="region", aria_label=caption)


def embedded(data: Any, name: str) -> Markup:
    """Data for the page's script. It contains no `<`, so nothing in it can end the element or start another."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return tag("script", Markup(text), type="application/json", id=name)


def svg_image(svg: str, alt: str) -> Markup:
    """An inline image: browsers run no scripts inside images."""
    data = base64.b64encode(svg.encode()).decode()
    return tag("img", src=f"data:image/svg+xml;base64,{data}", alt=alt)
