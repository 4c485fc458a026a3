"""Text from Jinja2 templates that is escaped by construction: HTML, LaTeX, Markdown."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup


def environment(folder: Path, escape: Callable[[Any], str], **delimiters: Any) -> Environment:
    """The templates of a folder. Escapes every value except what templates made; raises for a missing value.

    `escape` receives each value as it is: if it takes only text, templates convert numbers. Jinja escapes literals
    inside its braces as HTML, so write them outside. `delimiters`: options of `Environment`.
    """

    def escaped(value: Any) -> Markup:
        return value if isinstance(value, Markup) else Markup(escape(value))

    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,  # what templates made is `Markup`
        finalize=escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **delimiters,
    )
