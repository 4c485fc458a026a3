"""Documents for perplexity: JSONL with a `text` in every row, grouped by source.

folder/c4_en.jsonl            one file per source,
folder/ptb/val/a.jsonl.gz     or one folder per source, with all files below it,
file.jsonl                    or one file with a `source` in every row (by default, the file's name)
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dualres.data.source import COMPRESSIONS, json_rows
from dualres.util.errors import DataError

ENDINGS = (".jsonl", *(f".jsonl{compression}" for compression in COMPRESSIONS))
SPLITS = ("train", "val", "validation", "dev", "test")  # Paloma has val and test
MAX_SOURCES = 1000  # in one file, which is read once per source

# Paloma's folders -> the paper's groups, in the order of its table
PALOMA: dict[str, str] = yaml.safe_load(Path(__file__).with_name("paloma.yaml").read_text("utf-8"))


class DocumentSource(NamedTuple):
    """The documents of one source."""

    name: str
    files: tuple[Path, ...]
    by_row: bool  # whether the files mix sources, and each row names its own
    documents: int
    bytes: int  # of the texts in UTF-8
    content: str  # digest of the texts, in order


def find_sources(path: Path) -> list[DocumentSource]:
    """The sources of a file or folder. Everything is read once, so that errors appear before any model runs."""
    groups: list[tuple[str | None, list[Path]]]
    if path.is_dir():
        groups = [*_layout(path).items()]
    elif path.is_file() and not path.name.endswith(ENDINGS):
        raise DataError(f"{path} has an unknown suffix: use {', '.join(ENDINGS)}")
    elif path.is_file():
        groups = [(None, [path])]
    else:
        raise DataError(f"no documents at {path}: use a JSONL file, or a folder with a file or folder per source")
    return [source for name, files in groups for source in _sources(name, files)]


def texts(source: DocumentSource) -> Iterator[str]:
    """The documents of a source. Raises at the end if they changed since `find_sources`."""
    tally = _Tally()
    for _, name, text in _documents(None if source.by_row else source.name, source.files):
        if name == source.name:
            tally.add(text)
            yield text
    if tally.hash.hexdigest() != source.content:
        raise DataError(f"the source {source.name} changed while it was being read: rerun the command")


def _sources(name: str | None, files: Sequence[Path]) -> Iterator[DocumentSource]:
    """The source `name`; if None, the sources named in the rows, in order of appearance."""
    tallies: dict[str, _Tally] = {}
    for where, source, text in _documents(name, files):
        if source not in tallies and len(tallies) == MAX_SOURCES:
            raise DataError(
                f"{where} has source number {MAX_SOURCES + 1:,}, {source!r:.40}: `source` must name a collection of "
                "texts, not each text"
            )
        tallies.setdefault(source, _Tally()).add(text)
    for source, tally in (tallies or {name or _stem(files[0]): _Tally()}).items():
        if tally.bytes == 0:
            where = ", ".join(str(file) for file in files[:3])
            raise DataError(f"the source {source} has no text ({where}): add documents to it, or remove it")
        content = tally.hash.hexdigest()
        yield DocumentSource(source, tuple(files), name is None, tally.documents, tally.bytes, content)


def _documents(name: str | None, files: Sequence[Path]) -> Iterator[tuple[str, str, str]]:
    """Location, source and text of every row. The source is `name`; if None, it is read from the row."""
    for path in files:
        for where, row in json_rows(path):
            if not isinstance(row, dict):
                raise DataError(f'{where} is not an object but {row!r:.40}: write {{"text": "…"}}')
            source = name or _string({"source": _stem(path), **row}, "source", where)
            yield where, source, _string(row, "text", where)


def _layout(folder: Path) -> dict[str, list[Path]]:
    """Source name -> files. Hidden files, such as a download's cache, are ignored."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            below = sorted(p for p in path.rglob("[!.]*") if p.is_file() and p.name.endswith(ENDINGS))
            if not below:
                raise DataError(
                    f"{path} has no file that ends with {', '.join(ENDINGS)}: add one, or remove the folder"
                )
            name = path.name
            splits = sorted({p.relative_to(path).parts[0] for p in below} & {*SPLITS})
            if len(splits) > 1:
                raise DataError(f"{path} has the splits {' and '.join(splits)}: keep the one to evaluate")
        elif path.name.endswith(ENDINGS):
            below, name = [path], _stem(path)
        else:
            continue
        if name in found:
            raise DataError(f"{path} and {found[name][0]} are both the source {name}: keep one")
        found[name] = below
    if not found:
        raise DataError(f"{folder} has no documents: add a file per source, such as c4_en.jsonl")
    return found


def _string(row: dict[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or (key == "source" and not value):
        keys = ", ".join(row) or "nothing"
        raise DataError(f"{where} has {value!r:.40} as `{key}`, not a string (it has {keys}): fix or remove the row")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can encode a lone surrogate, "\\ud800"
        raise DataError(f"{where} has a `{key}` that is not valid Unicode, fix or remove the row: {error}") from None
    return value


def _stem(path: Path) -> str:
    """c4_en.jsonl.gz -> c4_en"""
    return path.name.rpartition(".jsonl")[0]


class _Tally:
    def __init__(self) -> None:
        self.documents = self.bytes = 0
        self.hash = hashlib.blake2b(digest_size=16)

    def add(self, text: str) -> None:
        data = text.encode()
        self.documents += 1
        self.bytes += len(data)
        self.hash.update(f"{len(data)} ".encode() + data)  # the length makes document boundaries part of the digest
