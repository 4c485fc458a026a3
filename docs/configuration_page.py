"""Writes docs/reference/configuration.md from the schema and from the options of the residual methods.

`python docs/configuration_page.py` after a change to either; a test compares the page with them.
"""

import dataclasses
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from dualres.config.documentation import documentation
from dualres.config.schema import AnalyzeConfig, ModelConfig, ResidualConfig, TrainConfig
from dualres.config.validation import Bounds
from dualres.residual.registry import METHODS

PAGE = Path(__file__).parent / "reference" / "configuration.md"
SECTIONS = {"model": ModelConfig, "residual": ResidualConfig, "train": TrainConfig, "analyze": AnalyzeConfig}
INTRODUCTION = """\
<!-- Written by docs/configuration_page.py from dualres/config/schema.py and dualres/residual/. -->

# Configuration

An experiment is one file of `configs/scale/` and one of `configs/residual/`: by construction, only
the residual changes between methods. Commands take both by name or by path, then overrides:

```console
$ dualres describe 0.1b dar-block --set residual.branches_per_block=8 --set model.layers=12
```

The scale's file comes first, then the residual's, then each `--set`, left to right. A file may
start with `base: NAME` (or a path relative to its own folder) and change only what differs. `null`
unsets a key that may be `null`. An invalid key or value is an error that names the key, the value
and the remedy, with exit code 2. Values are also checked against each other before a run starts,
such as heads, experts and layers against the ranks that they are distributed over.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for name, section in SECTIONS.items():
        parts += [f"## `{name}`\n", _prose(section), _table(section)]
        if section is ResidualConfig:
            parts += _methods()
    return "\n".join(parts)


def _methods() -> Iterator[str]:
    """The methods, and the options that groups of methods share."""
    sizes = {name: row.branches_per_block or "`default_branches_per_block`" for name, row in METHODS.items()}
    yield "| method | branches per block |\n|---|---|\n" + "".join(f"| `{k}` | {v} |\n" for k, v in sizes.items())
    for options in dict.fromkeys(row.options for row in METHODS.values()):
        if dataclasses.fields(options):
            names = [f"`{name}`" for name, row in METHODS.items() if row.options is options]
            yield f"### Options of {', '.join(names)}\n"
            yield _table(options)


def _prose(section: type) -> str:
    paragraphs = inspect.cleandoc(section.__doc__ or "").split("\n\n")
    return "\n\n".join(textwrap.fill(paragraph, 100) for paragraph in paragraphs) + "\n"


def _table(section: type) -> str:
    rows = "".join(f"| `{key}` | {kind} | {default} | {meaning} |\n" for key, kind, default, meaning in _rows(section))
    return f"| key | type | default | meaning |\n|---|---|---|---|\n{rows}"


def _rows(section: type, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Key, type, default and meaning of every documented field; a nested section follows its own row."""
    hints, parameters = typing.get_type_hints(section, include_extras=True), inspect.signature(section).parameters
    for name, meaning in documentation(section).items():
        inner = next(
            (kind for kind in (hints[name], *typing.get_args(hints[name])) if dataclasses.is_dataclass(kind)), None
        )
        given = parameters[name].default
        default = (
            "required" if given is inspect.Parameter.empty else "" if inner and given is not None else _text(given)
        )
        yield prefix + name, "section" if inner else _type(hints[name]), default, meaning
        if inner:
            yield from _rows(typing.cast(type, inner), f"{prefix}{name}.")


def _type(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return f"{_type(arguments[0])} {_bounds(arguments[1])}"
    if origin in (types.UnionType, typing.Union):
        return _type(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return f"list of {_type(arguments[0])}" if arguments[-1] is ... else f"{len(arguments)} × {_type(arguments[0])}"
    return {bool: "true or false", int: "integer", float: "number", str: "text"}[hint]


def _bounds(bounds: Bounds) -> str:
    exclusive = bounds.exclusive_minimum > -math.inf
    low = f"> {bounds.exclusive_minimum:g}" if exclusive else f"≥ {bounds.minimum:g}"
    return low if bounds.maximum > 10_000 else f"{low}, ≤ {bounds.maximum:,}"


def _text(value: Any) -> str:
    """The value as YAML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else f"{value}"
    )


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
