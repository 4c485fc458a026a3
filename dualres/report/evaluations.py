"""The tables of `dualres evaluate`, from its report.json."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dualres.config.schema import ConfigError
from dualres.evaluate.tables import REFERENCE, ResultTable, TableCell
from dualres.report.html import Markup, RowGroup, join, notes, tag
from dualres.report.html import table as html_table

REPORT, FOLDER = "report.json", "evaluations"  # the file, and the folder that is searched for it
_AGAIN = "run the same dualres evaluate command again; it reuses existing results."


class Evaluation(NamedTuple):
    """The contents of one file; no tables if an older version wrote it."""

    file: Path
    tables: tuple[ResultTable, ...] | None


def find_evaluations(requested: Sequence[Path], runs: Sequence[Path]) -> list[Evaluation]:
    """The requested ones, and those inside the given folders of runs and suites."""
    for folder in requested:
        if not (folder / REPORT).is_file():
            raise ConfigError(f"--evaluation {folder} has no {REPORT}: pass the --out folder of `dualres evaluate`")
    folders = [*requested, *(path / FOLDER for path in runs if (path / FOLDER / REPORT).is_file())]
    return [_read(file) for file in {(folder / REPORT).resolve(): folder / REPORT for folder in folders}.values()]


def as_html(found: Evaluation) -> Markup:
    if found.tables is None:
        return tag("p", f"{found.file} was written by an older version and has no tables: {_AGAIN}", class_="notice")
    return join(*(_as_html(table) for table in found.tables))


def _as_html(table: ResultTable) -> Markup:
    reference = [RowGroup(REFERENCE, [_texts(row) for row in table.reference])] if table.reference else []
    groups = [RowGroup("", [_texts(row) for row in table.rows]), *reference]
    return join(html_table(table.title, table.header, groups), notes(table.notes))


def _texts(row: Sequence[TableCell]) -> list[str]:
    return [
        join(tag("b", cell.text) if cell.bold else cell.text, f" ± {cell.error}" if cell.error else "") for cell in row
    ]


def _read(file: Path) -> Evaluation:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return Evaluation(file, tuple(_table(given) for given in data["tables"]) if "tables" in data else None)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file} cannot be read ({error!r}): {_AGAIN}") from None


def _table(given: dict[str, Any]) -> ResultTable:
    def cells(rows: list[list[dict[str, Any]]]) -> tuple[tuple[TableCell, ...], ...]:
        return tuple(tuple(TableCell(**cell) for cell in row) for row in rows)

    parts = {"header": tuple(given["header"]), "notes": tuple(given["notes"])}
    return ResultTable(**{**given, **parts, "rows": cells(given["rows"]), "reference": cells(given["reference"])})
