"""Plain-text tables for the terminal."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows under a header, with numbers right-aligned and text left-aligned."""
    cells = [[_text(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *cells]) for i in range(len(header))]
    right = [all(_is_number(row[i]) for row in rows if row[i] != "") for i in range(len(header))]

    def line(values: Sequence[str]) -> str:
        padded = [v.rjust(w) if r else v.ljust(w) for v, w, r in zip(values, widths, right, strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), line(["─" * w for w in widths]), *map(line, cells)])


def _text(cell: object) -> str:
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)


def _is_number(cell: object) -> bool:
    return str(cell).replace(",", "").replace(".", "").lstrip("+-−").isdigit()
