"""The tables of `dualres evaluate`, from its report.json."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualres.config.schema import ConfigError
from dualres.evaluate.tables import REFERENCE, ResultTable, TableCell
from dualres.report.html import Markup, join, notes, tag
from dualres.report.html import table as html_table

REPORT, FOLDER = "report.json", "evaluations"  # the file, and the folder that is searched for it
_AGAIN = "run the same dualres evaluate command again; it reuses existing results."


def as_html(requested: Sequence[Path], runs: Sequence[Path]) -> Markup:
    """The tables of the requested evaluations, and of those inside the given folders of runs and suites."""
    for folder in requested:
        if not (folder / REPORT).is_file():
            raise ConfigError(f"--evaluation {folder} has no {REPORT}: pass the --out folder of `dualres evaluate`")
    folders = [*requested, *(path / FOLDER for path in runs if (path / FOLDER / REPORT).is_file())]
    files = {(folder / REPORT).resolve(): folder / REPORT for folder in folders}
    return join(*(_evaluation(file) for file in files.values()))


def _evaluation(file: Path) -> Markup:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        tables = [_table(given) for given in data["tables"]] if "tables" in data else None
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file} cannot be read ({error!r}): {_AGAIN}") from None
    if tables is None:
        return tag("p", f"{file} was written by an older version and has no tables: {_AGAIN}", class_="notice")
    return join(*(_as_html(table) for table in tables))


def _as_html(table: ResultTable) -> Markup:
    groups = {"": [_texts(row) for row in table.rows]}
    if table.reference:
        groups[REFERENCE] = [_texts(row) for row in table.reference]
    return join(html_table(table.title, table.header, groups), notes(table.notes))


def _texts(row: Sequence[TableCell]) -> list[str]:
    return [
        join(tag("b", cell.text) if cell.bold else cell.text, f" ± {cell.error}" if cell.error else "") for cell in row
    ]


def _table(given: dict[str, Any]) -> ResultTable:
    def cells(rows: list[list[dict[str, Any]]]) -> tuple[tuple[TableCell, ...], ...]:
        return tuple(tuple(TableCell(**cell) for cell in row) for row in rows)

    parts = {"header": tuple(given["header"]), "notes": tuple(given["notes"])}
    return ResultTable(**{**given, **parts, "rows": cells(given["rows"]), "reference": cells(given["reference"])})
