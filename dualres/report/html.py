"""Markup that is escaped by construction: text becomes markup only through `tag`, which escapes it."""

import base64
import html
import json
from collections.abc import Sequence
from typing import Any

_EMPTY = {"meta", "link", "img", "col"}  # elements that have no end


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str) -> Markup:
    """An element; `class_` stands for class, and `_` within a name for a hyphen."""
    given = "".join(f' {_attribute(key)}="{html.escape(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{given}>" if name in _EMPTY else f"<{name}{given}>{join(*children)}</{name}>")


def join(*children: str, between: str = "") -> Markup:
    """One after the other; what is no markup yet is escaped."""
    return Markup(between.join(child if isinstance(child, Markup) else html.escape(child) for child in children))


def code(text: str) -> Markup:
    """Names, commands and files."""
    return tag("code", text)


def notes(texts: Sequence[str]) -> Markup:
    """A list of remarks, or nothing."""
    return tag("ul", *(tag("li", text) for text in texts), class_="notes") if texts else Markup()


def embedded(data: Any, name: str) -> Markup:
    """Data for the page's script. No `<` is left, so nothing in it can end the element or begin another."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return tag("script", Markup(text), type="application/json", id=name)


def svg_image(svg: str, alt: str) -> Markup:
    """A picture inside of the page: as an image, whose scripts a browser does not run."""
    data = base64.b64encode(svg.encode()).decode()
    return tag("img", src=f"data:image/svg+xml;base64,{data}", alt=alt)


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")
