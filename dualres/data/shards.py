"""Token shards on disk: flat files of little-endian token ids, and an index with their sizes and checksums."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dualres.config.validation import suggesting_path
from dualres.data import tokenizer as tokenizers
from dualres.util.atomic_files import flush, naming, partial_of, write_json
from dualres.util.errors import DataError
from dualres.util.progress import Show, silent

INDEX, TOKENIZER = "index.json", "tokenizer.json"
FORMAT = "dualres tokens 2"
Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
READ = 2**24  # tokens read at a time


@dataclass(frozen=True)
class Shard:
    """One file of tokens, in which every document ends with the end-of-text token."""

    file: str
    tokens: int
    documents: int
    checksum: str  # blake2b of the file


@dataclass(frozen=True)
class Index:
    """The contents of a prepared folder."""

    source: str
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    end_of_text: int
    fingerprint: str  # of the tokenizer
    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]

    def shards(self, split: Split) -> tuple[Shard, ...]:
        return self.train if split == "train" else self.validation

    @property
    def content(self) -> str:
        """A hash of the tokens."""
        sums = "/".join(" ".join(shard.checksum for shard in self.shards(split)) for split in SPLITS)
        return hashlib.blake2b(sums.encode(), digest_size=16).hexdigest()

    def tokens(self, split: Split) -> int:
        return sum(shard.tokens for shard in self.shards(split))


class ShardWriter:
    """Writes one shard under a temporary name as tokens arrive; `close` renames it into place."""

    def __init__(self, path: Path, dtype: str):
        self.path, self.dtype = path, np.dtype(dtype).newbyteorder("<")
        self.partial = partial_of(path)
        self.file = self.partial.open("wb")
        self.hash = hashlib.blake2b(digest_size=16)
        self.tokens = self.documents = 0

    def add(self, document: NDArray[np.uint32]) -> None:
        """Append the tokens of one document, including end of text."""
        data = document.astype(self.dtype).tobytes()
        with naming(self.path):
            self.file.write(data)
        self.hash.update(data)
        self.tokens += len(document)
        self.documents += 1

    def close(self) -> Shard | None:
        """The finished shard, which replaces one left by an interruption; None if nothing was written."""
        with naming(self.path):
            flush(self.file)
        self.file.close()
        if self.documents == 0:
            self.partial.unlink()
            self.path.unlink(missing_ok=True)
            return None
        self.partial.replace(self.path)
        return Shard(self.path.name, self.tokens, self.documents, self.hash.hexdigest())


def write_index(folder: Path, index: Index) -> None:
    """Complete a prepared folder: the index is written last."""
    write_json(folder / INDEX, {"format": FORMAT, **dataclasses.asdict(index)})


def read_index(folder: Path) -> Index:
    """The index of a prepared folder, after checking its tokenizer and file sizes."""
    path = folder / INDEX
    if not path.is_file():
        message = f"{folder} has no {INDEX}: create it with `dualres prepare SOURCE {folder}`"
        raise DataError(suggesting_path(message, folder))
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("format") != FORMAT:
            raise KeyError("format")
        for split in SPLITS:
            data[split] = tuple(Shard(**row) for row in data[split])
        index = Index(**data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not an index of this version ({error!r}): remove {folder}, prepare again") from None
    check_sizes(folder, index)
    read_tokenizer(folder, index)
    return index


def check_sizes(folder: Path, index: Index) -> None:
    """Reject a folder with missing or truncated files."""
    for shard in (*index.train, *index.validation):
        path, wanted = folder / shard.file, shard.tokens * np.dtype(index.dtype).itemsize
        if not path.is_file():
            raise DataError(f"{path} is missing: restore it, or prepare the data again")
        size = path.stat().st_size
        if size != wanted:
            raise DataError(f"{path} is truncated or altered ({size:,} bytes, not {wanted:,}): prepare the data again")


def read_tokenizer(folder: Path, index: Index) -> tokenizers.Tokenizer:
    """The tokenizer of the shards. Raises if the file holds a different one."""
    tokenizer = tokenizers.load(folder / TOKENIZER, index.end_of_text)
    if tokenizer.fingerprint != index.fingerprint:
        raise DataError(
            f"{folder / TOKENIZER} is not the tokenizer that made these shards (fingerprint {tokenizer.fingerprint}, "
            f"the index says {index.fingerprint}): restore it, or prepare the data again"
        )
    return tokenizer


def verify(
    folder: Path,
    index: Index,
    vocab_size: int,
    known: Mapping[str, Any] = {},
    share: tuple[int, int] = (0, 1),
    show: Show = silent,
) -> dict[str, Any]:
    """Read every shard once; reject a wrong checksum or a token outside the vocabulary.

    -> size and modification time of every file; files unchanged since they were `known` are skipped. With `share`
    (rank, ranks), each of several processes reads a part of a large folder.
    """
    seen, chosen = {}, (*index.train, *index.validation)[share[0] :: share[1]]
    for number, shard in enumerate(chosen, 1):
        path = folder / shard.file
        status = path.stat()
        stamp = [status.st_size, status.st_mtime_ns, shard.checksum, vocab_size]
        if known.get(shard.file) != stamp:
            show(f"verifying {path} ({number}/{len(chosen)})")
            _check_content(path, shard, np.dtype(index.dtype), vocab_size)
        seen[shard.file] = stamp
    return seen


def _check_content(path: Path, shard: Shard, dtype: np.dtype[Any], vocab_size: int) -> None:
    checksum = hashlib.blake2b(digest_size=16)
    tokens = np.memmap(path, dtype.newbyteorder("<"), "r")
    for start in range(0, len(tokens), READ):
        piece = tokens[start : start + READ]
        largest = int(piece.max())
        if largest >= vocab_size:
            at = start + int(piece.argmax())
            raise DataError(
                f"{path} has token {largest} at position {at}, outside model.vocab_size={vocab_size}: use a "
                f"model.vocab_size above {largest}, or prepare the data with a smaller vocabulary"
            )
        checksum.update(piece.tobytes())
    if checksum.hexdigest() != shard.checksum:
        raise DataError(f"{path} was altered (its checksum differs from the index): prepare the data again")


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    return "uint16" if vocab_size <= 2**16 else "uint32"


def read_stamps(path: Path) -> dict[str, Any] | None:
    """A stored result of `verify`; None if missing or unreadable."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
