"""The tables of `dualres evaluate`, from the report.json that it writes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dualres.config.schema import ConfigError
from dualres.evaluate.tables import REFERENCE, Cell, Table
from dualres.report.html import Markup, join, notes, tag
from dualres.report.tables import Block, html_table

REPORT, FOLDER = "report.json", "evaluations"  # the file, and where it is looked for


class Evaluation(NamedTuple):
    """What one file holds; no tables where an older version wrote it."""

    file: Path
    tables: tuple[Table, ...] | None


def find_evaluations(asked: Sequence[Path], given: Sequence[Path]) -> list[Evaluation]:
    """Those that were asked for, and those that lie in the given folders of runs and suites."""
    for folder in asked:
        if not (folder / REPORT).is_file():
            raise ConfigError(
                f"--evaluation {folder} has no {REPORT}: give the folder that `dualres evaluate --out` wrote into"
            )
    folders = [*asked, *(path / FOLDER for path in given if (path / FOLDER / REPORT).is_file())]
    return [_read(file) for file in {(folder / REPORT).resolve(): folder / REPORT for folder in folders}.values()]


def as_html(found: Evaluation) -> Markup:
    """Every table with its notes, or what to do about a file that has none."""
    if found.tables is None:
        return tag("p", f"{found.file} was written by an older version and has no tables: {_AGAIN}", class_="notice")
    return join(*(_as_html(table) for table in found.tables))


_AGAIN = "give the same dualres evaluate command again, which keeps what it has measured."


def _as_html(table: Table) -> Markup:
    reference = [Block(REFERENCE, [_texts(row) for row in table.reference])] if table.reference else []
    blocks = [Block("", [_texts(row) for row in table.rows]), *reference]
    return join(html_table(table.title, table.header, blocks), notes(table.notes))


def _texts(row: Sequence[Cell]) -> list[str]:
    return [
        join(tag("b", cell.text) if cell.bold else cell.text, f" ± {cell.error}" if cell.error else "") for cell in row
    ]


def _read(file: Path) -> Evaluation:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return Evaluation(file, tuple(_table(given) for given in data["tables"]) if "tables" in data else None)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file} cannot be read ({error!r}): {_AGAIN}") from None


def _table(given: dict[str, Any]) -> Table:
    def cells(rows: list[list[dict[str, Any]]]) -> tuple[tuple[Cell, ...], ...]:
        return tuple(tuple(Cell(**cell) for cell in row) for row in rows)

    return Table(
        **{
            **given,
            "header": tuple(given["header"]),
            "rows": cells(given["rows"]),
            "reference": cells(given["reference"]),
            "notes": tuple(given["notes"]),
        }
    )
