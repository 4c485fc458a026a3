"""Documents to measure on: JSONL with a `text` in every row, and the source that each belongs to.

folder/c4_en.jsonl            one file per source,
folder/ptb/val/a.jsonl.gz     or one folder per source: all files below it,
file.jsonl                    or one file whose rows name their `source`; those that do not, have the file's name
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dualres.data.source import COMPRESSIONS, json_rows
from dualres.util.errors import DataError

ENDINGS = (".jsonl", *(f".jsonl{compression}" for compression in COMPRESSIONS))
SPLITS = ("train", "val", "validation", "dev", "test")  # Paloma has val and test
MOST_SOURCES = 1000  # of one file, which is read once for each

PALOMA = {  # the folders of Paloma's sources: the paper's groups, in the order of its table
    "4chan_meta_sep": "4chan",
    "c4_100_domains": "C4 100 Domains",
    "c4_en": "C4",
    "dolma-v1_5": "Dolma v1.5",
    "dolma_100_programing_languages": "100 Programming Langs.",
    "dolma_100_subreddits": "100 Subreddits",
    "falcon-refinedweb": "Falcon RefinedWeb",
    "gab": "Gab",
    "m2d2_s2orc_unsplit": "M2D2 S2ORC",
    "m2d2_wikipedia_unsplit": "M2D2 Wikipedia",
    "manosphere_meta_sep": "Manosphere",
    "mc4": "mC4",
    "ptb": "PTB",
    "redpajama": "RedPajama",
    "twitterAAE_HELM_fixed": "Twitter AAE",
    "wikitext_103": "Wikitext-103",
}


class Source(NamedTuple):
    """Where documents come from, with what they were found to hold."""

    name: str
    files: tuple[Path, ...]
    by_row: bool  # only the rows that name it are its own; otherwise all are
    documents: int
    bytes: int  # of their texts in UTF-8
    content: str  # the same for the same texts in the same order


def find_sources(path: Path) -> list[Source]:
    """The sources of a file or folder. All of it is read once, so that what is wrong shows before anything runs."""
    if path.is_file():
        found = _of_rows(path)
    elif path.is_dir():
        found = [_of_files(name, files) for name, files in _layout(path).items()]
    else:
        raise DataError(f"no documents at {path}: give a folder with a file or folder per source, or a JSONL file")
    for source in found:
        if source.bytes == 0:
            where = ", ".join(str(file) for file in source.files[:3])
            raise DataError(f"the source {source.name} has no text ({where}): add documents to it, or take it away")
    return found


def texts(source: Source) -> Iterator[str]:
    """Its documents one after the other, refused at the end where they are not those that were found."""
    tally = _Tally()
    for text in _texts(source.name, source.files, source.by_row):
        tally.add(text)
        yield text
    if tally.content != source.content:
        raise DataError(f"the source {source.name} has changed while it was read: give the same command again")


def group_name(source: str) -> str:
    """The paper's name of a Paloma source; any other keeps its own."""
    return PALOMA.get(source, source)


def _layout(folder: Path) -> dict[str, list[Path]]:
    """The files of every source of a folder, by name. Hidden ones, such as a download's cache, are left alone."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            below = sorted(p for p in path.rglob("[!.]*") if p.is_file() and _is_documents(p))
            if not below:
                raise DataError(f"{path} holds no file that ends with {', '.join(ENDINGS)}: fill it, or take it away")
            name = path.name
            splits = sorted({p.relative_to(path).parts[0] for p in below} & {*SPLITS})
            if len(splits) > 1:
                raise DataError(f"{path} holds the splits {' and '.join(splits)}: keep the one to measure on")
        elif _is_documents(path):
            below, name = [path], _stem(path)
        else:
            continue
        if name in found:
            raise DataError(f"{path} and {found[name][0]} are both the source {name}: keep one of them")
        found[name] = below
    if not found:
        raise DataError(f"{folder} holds no documents: put a file per source there, such as c4_en.jsonl")
    return found


def _of_files(name: str, files: list[Path]) -> Source:
    tally = _Tally()
    for text in _texts(name, files, by_row=False):
        tally.add(text)
    return Source(name, tuple(files), False, tally.documents, tally.bytes, tally.content)


def _of_rows(path: Path) -> list[Source]:
    """The sources of a single file, in the order of their first rows."""
    if not _is_documents(path):
        raise DataError(f"{path} is of no known kind: name it {', '.join(ENDINGS)}")
    tallies: dict[str, _Tally] = {}
    for where, row in _rows(path):
        name = _source_of(row, path, where)
        if name not in tallies and len(tallies) == MOST_SOURCES:
            raise DataError(
                f"{where} names yet another source after {MOST_SOURCES:,}, {name!r:.40}: name in `source` where texts "
                "come from and not each text, or put one file per source into a folder"
            )
        tallies.setdefault(name, _Tally()).add(_text_of(row, where))
    if not tallies:
        raise DataError(f"the source {_stem(path)} has no text ({path}): add documents to it")
    return [Source(name, (path,), True, t.documents, t.bytes, t.content) for name, t in tallies.items()]


def _texts(name: str, files: list[Path] | tuple[Path, ...], by_row: bool) -> Iterator[str]:
    for path in files:
        for where, row in _rows(path):
            if not by_row or _source_of(row, path, where) == name:
                yield _text_of(row, where)


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, row in json_rows(path):
        if not isinstance(row, dict):
            raise DataError(f'{where} is no object but {row!r:.40}: write {{"text": "…"}}')
        yield where, row


def _text_of(row: dict[str, Any], where: str) -> str:
    if "text" not in row:
        raise DataError(f"{where} has no `text` (it has {', '.join(row) or 'nothing'}): put the document there")
    text = row["text"]
    if not isinstance(text, str):
        raise DataError(f"{where} has a `text` that is no string but {text!r:.40}: mend it or leave it out")
    return _encodable(text, "text", where)


def _source_of(row: dict[str, Any], path: Path, where: str) -> str:
    """What a row names, or the file's name."""
    name = row.get("source", _stem(path))
    if not isinstance(name, str) or not name:
        raise DataError(f"{where} has a `source` that is no name but {name!r:.40}: mend it or leave it out")
    return _encodable(name, "source", where)


def _encodable(text: str, key: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can write half of a pair, "\\ud800"
        raise DataError(f"{where} has a `{key}` that is no Unicode, mend it or leave it out: {error}") from None
    return text


def _is_documents(path: Path) -> bool:
    return path.name.endswith(ENDINGS)


def _stem(path: Path) -> str:
    """c4_en.jsonl.gz -> c4_en"""
    return path.name.rpartition(".jsonl")[0]


class _Tally:
    """Counts documents as they pass."""

    def __init__(self) -> None:
        self.documents = self.bytes = 0
        self.hash = hashlib.blake2b(digest_size=16)

    def add(self, text: str) -> None:
        data = text.encode()
        self.documents += 1
        self.bytes += len(data)
        self.hash.update(f"{len(data)} ".encode() + data)  # the length, so that edges between documents count

    @property
    def content(self) -> str:
        return self.hash.hexdigest()
