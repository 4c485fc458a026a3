"""The tables of `dualres evaluate`, from its report.json."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualres.config.schema import ConfigError
from dualres.evaluate.tables import REFERENCE
from dualres.report.html import Markup, join, notes, tag
from dualres.report.html import table as html_table

REPORT, FOLDER = "report.json", "evaluations"  # the file, and the folder that is searched for it
_AGAIN = "rerun the same dualres evaluate command; it reuses existing results."


def as_html(requested: Sequence[Path], runs: Sequence[Path]) -> Markup:
    """The tables of the requested evaluations, and of those inside the folders of runs and suites."""
    for folder in requested:
        if not (folder / REPORT).is_file():
            raise ConfigError(f"--evaluation {folder} has no {REPORT}: pass the --out folder of `dualres evaluate`")
    folders = [*requested, *(path / FOLDER for path in runs if (path / FOLDER / REPORT).is_file())]
    files = {(folder / REPORT).resolve(): folder / REPORT for folder in folders}
    return join(*(_evaluation(file) for file in files.values()))


def _evaluation(file: Path) -> Markup:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if "tables" in data:
            return join(*(_table(table) for table in data["tables"]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read ({error!r}): {_AGAIN}") from None
    return tag("p", f"{file} was written by an older version and has no tables: {_AGAIN}", class_="notice")


def _table(table: dict[str, Any]) -> Markup:
    groups = {"": [[_cell(**cell) for cell in row] for row in table["rows"]]}
    if table["reference"]:
        groups[REFERENCE] = [[_cell(**cell) for cell in row] for row in table["reference"]]
    return join(html_table(table["title"], table["header"], groups), notes(table["notes"]))


def _cell(text: str, error: str, bold: bool) -> Markup:
    return join(tag("b", text) if bold else text, f" ± {error}" if error else "")
