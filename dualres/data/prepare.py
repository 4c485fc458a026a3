"""From documents to token shards: streamed, on all cores, and taken up again where it was interrupted."""

import dataclasses
import hashlib
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dualres.data import shards
from dualres.data import tokenizer as tokenizers
from dualres.data.errors import DataError
from dualres.data.shards import SPLITS, Index, Shard, ShardWriter, Split
from dualres.data.source import Part, open_source
from dualres.data.tokenizer import Tokenizer, Tokens
from dualres.files import PARTIAL, partial_of, write_json

PROGRESS = "progress.json"
BATCH_CHARACTERS = 2**20  # of text that is tokenized together
BATCHES_AHEAD = 3  # being tokenized while another is written


@dataclass(frozen=True)
class Settings:
    """What decides the result: an interrupted preparation is taken up again only with the same settings."""

    source: str
    tokenizer: str  # bytes, bpe:SIZE, tekken, or the path of a tokenizer.json
    field: str = "text"
    subset: str | None = None
    split: str = "train"
    end_of_text: str | None = None
    held_out: float = 0.02  # share of the documents, chosen by a hash of their text
    shard_tokens: int = 100_000_000

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise DataError(f"--held-out {self.held_out} is no share of the documents: use a number from 0 up to 1")
        if self.shard_tokens < 1:
            raise DataError(f"--shard-tokens {self.shard_tokens} is not positive: use 100000000")


class Place(NamedTuple):
    """How far the source was read: whole parts, and documents of the part after them."""

    part: int
    documents: int


class Report(NamedTuple):
    """How far a preparation is."""

    part: str
    parts_done: int
    parts: int
    documents: int
    characters: int
    tokens: int


class Document(NamedTuple):
    """A text and where the source stands after it."""

    text: str
    after: Place


def prepare(settings: Settings, out: Path, report: Callable[[Report], None] = lambda _: None) -> Index:
    """Write the shards of a source to the folder `out`, and its index when all are there.

    A folder that has an index of the same settings is left as it is.
    """
    parts = open_source(settings.source, settings.field, settings.subset, settings.split)
    identity = {**dataclasses.asdict(settings), "parts": [[part.name, part.size] for part in parts]}
    out.mkdir(parents=True, exist_ok=True)
    progress = _read_progress(out, identity)
    if progress is not None and (out / shards.INDEX).exists():
        return shards.read_index(out)
    for leftover in out.glob(f"*{PARTIAL}"):
        leftover.unlink()
    tokenizer = _tokenizer(settings, parts, out)
    if progress is None:
        progress = {"settings": identity, "place": [0, 0], **{split: [] for split in SPLITS}}
        write_json(out / PROGRESS, progress)

    done: dict[Split, list[Shard]] = {split: [Shard(**row) for row in progress[split]] for split in SPLITS}
    documents = _documents(parts, Place(*progress["place"]))
    encoded = _encoded(documents, tokenizer)
    dtype = shards.dtype_for(tokenizer.vocab_size)
    counted = _Counter(parts, sum(s.documents for split in SPLITS for s in done[split]), report)
    for number in itertools.count(progress.get("chunks", 0)):
        place = _write_chunk(encoded, tokenizer, settings, dtype, out, number, done, counted)
        if place is None:
            break
        rows: dict[str, Any] = {split: [dataclasses.asdict(shard) for shard in done[split]] for split in SPLITS}
        progress = {"settings": identity, "place": place, "chunks": number + 1, **rows}
        write_json(out / PROGRESS, progress)
    if not done["train"]:
        raise DataError(f"the source {settings.source} has no documents to train on: nothing was prepared")
    index = Index(
        settings.source,
        dtype,
        tokenizer.vocab_size,
        tokenizer.end_of_text,
        tokenizer.fingerprint,
        tuple(done["train"]),
        tuple(done["validation"]),
    )
    shards.write_index(out, index)
    return index


def is_held_out(text: str, share: float) -> bool:
    """Whether a document belongs to the validation split: by its text, so that copies of it are on the same side."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


class _Counter:
    """Adds up what was done, for the report."""

    def __init__(self, parts: Sequence[Part], documents: int, report: Callable[[Report], None]):
        self.parts, self.documents, self.report = parts, documents, report
        self.characters = self.tokens = 0

    def add(self, document: Document, tokens: int) -> None:
        self.documents += 1
        self.characters += len(document.text)
        self.tokens += tokens
        part = min(document.after.part, len(self.parts) - 1)
        self.report(Report(self.parts[part].name, part, len(self.parts), self.documents, self.characters, self.tokens))


def _write_chunk(
    encoded: Iterator[tuple[Document, Tokens]],
    tokenizer: Tokenizer,
    settings: Settings,
    dtype: str,
    out: Path,
    number: int,
    done: dict[Split, list[Shard]],
    counter: _Counter,
) -> Place | None:
    """One shard of each split, of about `shard_tokens` together. -> where the source stands, None at its end"""
    writers = {split: ShardWriter(out / f"{split}-{number:05d}.bin", dtype) for split in SPLITS}
    end = np.array([tokenizer.end_of_text], np.uint32)
    place = None
    written = 0
    for document, tokens in encoded:
        split: Split = "validation" if is_held_out(document.text, settings.held_out) else "train"
        writers[split].add(np.concatenate([tokens, end]))
        counter.add(document, len(tokens) + 1)
        place = document.after
        written += len(tokens) + 1
        if written >= settings.shard_tokens:
            break
    for split, writer in writers.items():
        shard = writer.close()
        if shard is not None:
            done[split].append(shard)
    return place


def _documents(parts: Sequence[Part], start: Place) -> Iterator[Document]:
    """All documents but empty ones, from `start` on."""
    for number, part in enumerate(parts[start.part :], start=start.part):
        skip = start.documents if number == start.part else 0
        for count, text in enumerate(itertools.islice(part.documents(), skip, None), start=skip + 1):
            if text:
                yield Document(text, Place(number, count))


def _encoded(documents: Iterator[Document], tokenizer: Tokenizer) -> Iterator[tuple[Document, Tokens]]:
    """Documents with their tokens, in order. While one batch is written, the next are read and tokenized."""
    with ThreadPoolExecutor(BATCHES_AHEAD) as pool:
        waiting: deque[tuple[list[Document], Future[list[Tokens]]]] = deque()
        for batch in _batches(documents):
            waiting.append((batch, pool.submit(tokenizer.encode_batch, [document.text for document in batch])))
            if len(waiting) > BATCHES_AHEAD:
                ready, tokens = waiting.popleft()
                yield from zip(ready, tokens.result(), strict=True)
        for ready, tokens in waiting:
            yield from zip(ready, tokens.result(), strict=True)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _tokenizer(settings: Settings, parts: Sequence[Part], out: Path) -> Tokenizer:
    """The one that an interrupted preparation stored, or a new one."""
    path = out / shards.TOKENIZER
    name = settings.tokenizer
    if name == "bytes":
        made = tokenizers.byte_tokenizer()
    elif name == "tekken":
        made = tokenizers.tekken()
    elif name.startswith("bpe:"):
        if path.exists():
            return tokenizers.load(path)
        if not name[4:].isdigit():
            raise DataError(f"--tokenizer {name}: write bpe:4096, the number of entries after the colon")
        made = tokenizers.train_bpe((text for part in parts for text in part.documents()), int(name[4:]))
    elif Path(name).is_file():
        made = tokenizers.load(Path(name), settings.end_of_text)
    else:
        raise DataError(f"--tokenizer {name}: use bytes, bpe:4096, tekken, or the path of a tokenizer.json")
    partial = partial_of(path)
    made.save(partial)
    partial.replace(path)
    return made


def _read_progress(out: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """What an earlier run left, or None in a new folder; another preparation's folder is refused."""
    path = out / PROGRESS
    if not path.exists():
        if any(out.iterdir()):
            raise DataError(f"{out} is not empty and holds no preparation: use a new folder")
        return None
    try:
        progress = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} cannot be read ({error}): remove {out} and prepare again") from None
    found = progress.get("settings", {})
    changed = [key for key in identity if found.get(key) != json.loads(json.dumps(identity[key]))]
    if changed:
        what = ", ".join(f"{key} {found.get(key)!r} → {identity[key]!r}" for key in changed if key != "parts")
        raise DataError(
            f"{out} was prepared from other settings ({what or 'the files of the source have changed'}): use a new "
            "folder, or the settings it began with"
        )
    return progress
