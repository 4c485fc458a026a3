"""Sources: where documents come from, as parts that are read one after the other in a fixed order.

A text file is cut at blank lines into documents of about 16,000 characters; JSONL and Parquet hold one per row.
"""

import gzip
import io
import json
import pydoc_data.topics
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dualres.data.errors import DataError
from dualres.extras import need

PYTHON = "python"  # the name of the default source
DOCUMENT_CHARACTERS = 16_000  # of a text file; a document ends with the paragraph that reaches it
FORMATS = (".txt", ".jsonl", ".json", ".parquet")
COMPRESSIONS = (".gz", ".zst")
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Part(NamedTuple):
    """One piece of a source, such as a file. `size` is in bytes, 0 where it is not known."""

    name: str
    size: int
    documents: Callable[[], Iterator[str]]


def open_source(name: str, field: str = "text", subset: str | None = None, split: str = "train") -> list[Part]:
    """The parts of a source: `python`, a file, a folder of files, or the name of a Hugging Face dataset.

    `field` is the column or key that holds the text; `subset` and `split` are those of a dataset.
    """
    if name == PYTHON:
        return [Part("topics", 0, _topics), Part("library", 0, _library)]
    path = Path(name)
    if path.is_file():
        return [_file(path, path.name, field)]
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and _format(p) in FORMATS)
        if not found:
            raise DataError(f"{path} holds no file that ends with {', '.join(FORMATS)} (or these with .gz or .zst)")
        return [_file(p, p.relative_to(path).as_posix(), field) for p in found]
    if name.count("/") == 1 and not name.startswith((".", "/")) and not name.endswith(FORMATS + COMPRESSIONS):
        return [Part(f"{name} {subset or ''} {split}", 0, lambda: _dataset(name, subset, split, field))]
    raise DataError(
        f"no source {name!r}: use {PYTHON} (the standard library), a file, a folder, or a dataset's name, owner/name"
    )


def _format(path: Path) -> str:
    """What a file holds, by its name without the compression."""
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def _file(path: Path, name: str, field: str) -> Part:
    kind = _format(path)
    readers: dict[str, Callable[[], Iterator[str]]] = {
        ".txt": lambda: _text(path),
        ".jsonl": lambda: _jsonl(path, field),
        ".json": lambda: _jsonl(path, field),
        ".parquet": lambda: _parquet(path, field),
    }
    if kind not in readers:
        raise DataError(f"{path} is of no known kind: name it {', '.join(FORMATS)}, or these with .gz or .zst")
    return Part(name, path.stat().st_size, readers[kind])


@contextmanager
def _lines(path: Path) -> Iterator[Iterator[str]]:
    """The lines of a plain or compressed file; what is wrong with it becomes an error that names it."""
    number = 0

    def counted(file: io.TextIOBase) -> Iterator[str]:
        nonlocal number
        for line in file:
            number += 1
            yield line

    try:
        with _opened(path) as file:
            yield counted(file)
    except (UnicodeDecodeError, EOFError, OSError) as error:
        raise DataError(f"{path} cannot be read after line {number}: {error}") from None


def _opened(path: Path) -> io.TextIOBase:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8", newline="\n")
    if path.suffix == ".zst":
        zstandard = need("zstandard", "data", "reading .zst")
        return io.TextIOWrapper(zstandard.open(path, "rb"), encoding="utf-8", newline="\n")
    return path.open(encoding="utf-8", newline="\n")


def _text(path: Path) -> Iterator[str]:
    with _lines(path) as lines:
        gathered: list[str] = []
        size = 0
        for line in lines:
            gathered.append(line)
            size += len(line)
            if size >= DOCUMENT_CHARACTERS and not line.strip():
                yield "".join(gathered)
                gathered, size = [], 0
        if gathered:
            yield "".join(gathered)


def _jsonl(path: Path, field: str) -> Iterator[str]:
    with _lines(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, line {number} is not JSON: {error}") from None
            yield _text_of(row, field, f"{path}, line {number}")


def _parquet(path: Path, field: str) -> Iterator[str]:
    parquet = need("pyarrow.parquet", "data", "reading Parquet")
    try:
        with parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise DataError(f"{path} has no column {field!r}: use --field with one of {file.schema_arrow.names}")
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                for number, text in enumerate(batch.column(0).to_pylist()):
                    yield _text_of({field: text}, field, f"{path}, row {number} of a batch")
    except (OSError, need("pyarrow", "data", "reading Parquet").ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from None


def _dataset(name: str, subset: str | None, split: str, field: str) -> Iterator[str]:
    """Streamed from the hub, row by row."""
    datasets = need("datasets", "data", "reading a Hugging Face dataset")
    try:
        rows = datasets.load_dataset(name, subset, split=split, streaming=True)
    except Exception as error:  # no network, no such dataset, a gated one: `datasets` raises many kinds
        raise DataError(f"the dataset {name} cannot be opened: {type(error).__name__}: {error}") from None
    for number, row in enumerate(rows):
        yield _text_of(row, field, f"{name}, row {number}")


def _text_of(row: Any, field: str, where: str) -> str:
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        keys = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise DataError(f"{where} has no text under {field!r} (it has {keys}): name the field with --field")
    return text


def _topics() -> Iterator[str]:
    """The documentation topics of the Python language."""
    for name in sorted(pydoc_data.topics.topics):
        yield pydoc_data.topics.topics[name]


def _library() -> Iterator[str]:
    """The source text of the standard library, without its tests."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.rglob("*.py")):
        if NOT_LIBRARY.isdisjoint(path.relative_to(folder).parts):
            yield path.read_text(encoding="utf-8", errors="replace")
