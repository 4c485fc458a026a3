"""Document sources: parts that are read one after the other in a fixed order.

A text file is split at blank lines into documents of about 16,000 characters; JSONL and Parquet have one per row.
"""

import codecs
import functools
import gzip
import io
import json
import platform
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dualres.config.validation import suggesting, suggesting_path
from dualres.data.settings import PYTHON as PYTHON
from dualres.util.errors import DataError
from dualres.util.optional_dependencies import need

DOCUMENT_CHARACTERS = 16_000  # in a text file: a document ends with the paragraph that reaches this length,
MAX_CHARACTERS = 64_000  # or at this one, since a text without blank lines must not fill the memory
FORMATS = (".txt", ".jsonl", ".json", ".parquet")
COMPRESSIONS = (".gz", ".zst")
ENDINGS = f"that ends with {', '.join(FORMATS)} (all but .parquet also with {' or '.join(COMPRESSIONS)})"
BUFFER, ROWS = 2**20, 128  # bytes and rows of a Parquet file read at a time
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class SourcePart(NamedTuple):
    """One part of a source, such as a file. `size` is in bytes, 0 if unknown."""

    name: str
    size: int
    documents: Callable[[], Iterator[str]]


def open_source(name: str, field: str = "text", subset: str | None = None, split: str = "train") -> list[SourcePart]:
    """The parts of a source: `python`, a file, a folder of files, or the name of a Hugging Face dataset.

    `field` is the column or key of the text; `subset` and `split` belong to a dataset.
    """
    if name == PYTHON:
        version = f"of Python {platform.python_version()}"
        return [SourcePart(f"topics {version}", 0, _topics), SourcePart(f"library {version}", 0, _library)]
    path = Path(name)
    if path.is_file():
        return [_file(path, path.name, field)]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and _format(p) in FORMATS)
        if not files:
            raise DataError(f"{path} has no file {ENDINGS}: add one, or pass a different source")
        return [_file(p, p.relative_to(path).as_posix(), field) for p in files]
    if name.count("/") == 1 and not name.startswith((".", "/")) and not name.endswith(FORMATS + COMPRESSIONS):
        return [SourcePart(f"{name} {subset or ''} {split}", 0, lambda: _dataset(name, subset, split, field))]
    message = f"unknown source {name!r}: use {PYTHON} (the standard library), a file, a folder, or a dataset OWNER/NAME"
    raise DataError(suggesting_path(suggesting(message, name, [PYTHON]), path))


def _format(path: Path) -> str:
    """The suffix without the compression's."""
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def _file(path: Path, name: str, field: str) -> SourcePart:
    readers = {".txt": _text, ".jsonl": _jsonl, ".json": _jsonl, ".parquet": _parquet}
    if _format(path) not in FORMATS:
        raise DataError(f"{path} has an unknown format: use a file {ENDINGS}")
    return SourcePart(name, path.stat().st_size, functools.partial(readers[_format(path)], path, field))


def lines(path: Path, longest: int = -1) -> Iterator[tuple[int, str]]:
    """The lines of a plain or compressed file, numbered from 1. Lines longer than `longest` bytes are split."""
    number, decoder = 1, codecs.getincrementaldecoder("utf-8")()
    try:
        with _open(path) as file:
            while line := file.readline(longest):
                yield number, decoder.decode(line)
                number += line.endswith(b"\n")
            decoder.decode(b"", final=True)
    except (UnicodeDecodeError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path}, line {number} cannot be read; use a complete file in UTF-8: {error}") from None


def json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The location and value of each row of a JSONL file; blank lines are skipped."""
    for number, line in lines(path):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON; fix or remove the row: {error}") from None
        yield where, row


def _open(path: Path) -> io.BufferedIOBase:
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".zst":
        # The package zstandard reads a truncated file without an error.
        return io.BufferedReader(need("pyarrow", "data", "reading .zst").input_stream(path, compression="zstd"))
    return path.open("rb")


def _text(path: Path, field: str) -> Iterator[str]:
    text: list[str] = []
    size = 0
    for _, line in lines(path, MAX_CHARACTERS):
        text.append(line)
        size += len(line)
        if size >= (MAX_CHARACTERS if line.strip() else DOCUMENT_CHARACTERS):
            yield "".join(text)
            text, size = [], 0
    if text:
        yield "".join(text)


def _jsonl(path: Path, field: str) -> Iterator[str]:
    return (_text_of(row, field, where) for where, row in json_rows(path))


def _parquet(path: Path, field: str) -> Iterator[str]:
    parquet = need("pyarrow.parquet", "data", "reading Parquet")
    try:
        # Without these options whole row groups are read, and some files consist of a single one.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER) as file:
            if field not in file.schema_arrow.names:
                raise DataError(f"{path} has no column {field!r}: use --field with one of {file.schema_arrow.names}")
            batches = file.iter_batches(batch_size=ROWS, columns=[field])
            rows = (text for batch in batches for text in batch.column(0).to_pylist())
            for number, text in enumerate(rows, start=1):
                yield _text_of({field: text}, field, f"{path}, row {number}")
    except (OSError, UnicodeDecodeError, need("pyarrow", "data", "reading Parquet").ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}; restore or remove it") from None


def _dataset(name: str, subset: str | None, split: str, field: str) -> Iterator[str]:
    datasets = need("datasets", "data", "reading a Hugging Face dataset")
    try:
        rows = datasets.load_dataset(name, subset, split=split, streaming=True)
        for number, row in enumerate(rows, start=1):
            yield _text_of(row, field, f"{name}, row {number}")
    except DataError:
        raise
    except Exception as error:  # no network, no such dataset, a gated one: `datasets` raises many kinds
        why = " ".join(f"{type(error).__name__}: {error}".split())
        remedy = "check the name, the network and your access"
        raise DataError(f"{name} is not a file or folder, and cannot be read as a dataset: {why}; {remedy}") from None


def _text_of(row: Any, field: str, where: str) -> str:
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        keys = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise DataError(
            f"{where} has {text!r:.40} instead of text under {field!r} (it has {keys}): name the field with --field"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can encode half of a surrogate pair, "\\ud800"
        raise DataError(f"{where} is not valid Unicode; fix or remove the row: {error}") from None
    return text


def _topics() -> Iterator[str]:
    """The documentation topics of the Python language."""
    from pydoc_data.topics import topics  # half a megabyte

    for name in sorted(topics):
        yield topics[name]


def _library() -> Iterator[str]:
    """The source text of the standard library, without its tests."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.rglob("*.py")):
        if NOT_LIBRARY.isdisjoint(path.relative_to(folder).parts):
            yield path.read_text(encoding="utf-8", errors="replace")
