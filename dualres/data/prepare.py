"""Converts documents to token shards: streaming, on all cores, resumable after an interruption."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dualres.data import shards
from dualres.data import tokenizer as tokenizers
from dualres.data.settings import PYTHON
from dualres.data.settings import Settings as Settings
from dualres.data.shards import SPLITS, Index, Shard, ShardWriter, Split
from dualres.data.source import COMPRESSIONS, SourcePart, open_source
from dualres.data.tokenizer import Tokenizer, Tokens
from dualres.util.atomic_files import LOCK, locked, partial_of, write_json
from dualres.util.errors import DataError
from dualres.util.progress import Show, duration, short, silent

BATCH_CHARACTERS = 2**20  # characters tokenized together
BATCHES_AHEAD = 3  # batches tokenized while another is written
PROGRESS = "progress.json"
NOT_PLAIN = (".parquet", *COMPRESSIONS)  # the size of such a file does not say how much text it has


class SourcePosition(NamedTuple):
    """How far the source was read: whole parts, and documents of the next part."""

    part: int = 0
    documents: int = 0


@dataclass
class PrepareState:
    """The progress, in whole chunks of one shard per split; stored next to the shards."""

    settings: dict[str, Any]
    tokenizer: str | None = None  # fingerprint
    place: SourcePosition = field(default_factory=SourcePosition)
    chunks: int = 0
    train: list[Shard] = field(default_factory=list)
    validation: list[Shard] = field(default_factory=list)

    def write(self, out: Path) -> None:
        write_json(out / PROGRESS, dataclasses.asdict(self))


class Document(NamedTuple):
    """A text and the position in the source after it."""

    text: str
    after: SourcePosition


def prepare(settings: Settings, out: Path, show: Show = silent) -> Index:
    """Write the shards of a source to the folder `out`, then its index; a finished folder is left unchanged."""
    parts = open_source(settings.source, settings.field, settings.subset, settings.split)
    source = Path(settings.source)
    if settings.source != PYTHON and source.is_dir() and out.resolve().is_relative_to(source.resolve()):
        raise DataError(f"{out} is inside its source {settings.source}: write the shards to a different folder")
    out.mkdir(parents=True, exist_ok=True)
    check_folder(out)
    busy = DataError(f"another process is preparing {out}: wait for it, or use a new folder")
    with contextlib.nullcontext() if (out / shards.INDEX).exists() else locked(out, busy):
        return _prepare(settings, parts, out, show)


def _prepare(settings: Settings, parts: Sequence[SourcePart], out: Path, show: Show) -> Index:
    state = resume_or_start(out, {**dataclasses.asdict(settings), "parts": [[part.name, part.size] for part in parts]})
    if (out / shards.INDEX).exists():
        return shards.read_index(out)
    stored, name = out / shards.TOKENIZER, settings.tokenizer
    tokenizer = tokenizers.choose(name, stored, _texts(parts, show), settings.end_of_text)
    if state.tokenizer not in (None, tokenizer.fingerprint):
        changed = stored if name.startswith("bpe:") else name
        raise DataError(f"{changed} is not the tokenizer that {out} started with: restore it, or use a new folder")
    tokenizer.save(stored)
    is_text = all(part.size > 0 and not part.name.endswith(NOT_PLAIN) for part in parts)
    counter = _Counter("tokenizing", parts, state, show, [part.size for part in parts] if is_text else ())
    encoded = _encoded(_documents(parts, state.place), tokenizer, counter)
    while (place := _write_chunk(encoded, tokenizer, settings, out, state)) is not None:
        state.tokenizer, state.place, state.chunks = tokenizer.fingerprint, place, state.chunks + 1
        state.write(out)
    if not state.train:
        if state.validation:
            held_out = sum(shard.documents for shard in state.validation)
            raise DataError(
                f"all documents of {settings.source}, {held_out:,}, were held out, none is left for training: use a "
                f"smaller --held-out than {settings.held_out:g} with a new folder, or more documents"
            )
        raise DataError(f"the source {settings.source} has no documents for training: use a different source")
    index = Index(
        settings.source,
        shards.dtype_for(tokenizer.vocab_size),
        tokenizer.vocab_size,
        tokenizer.end_of_text,
        tokenizer.fingerprint,
        tuple(state.train),
        tuple(state.validation),
    )
    shards.check_sizes(out, index)
    shards.write_index(out, index)
    return index


def check_folder(out: Path) -> None:
    names = {file.name for file in out.iterdir()}
    if PROGRESS not in names and names - {partial_of(out / PROGRESS).name, LOCK}:
        raise DataError(f"{out} is not empty and was not created by `dualres prepare`: use a new folder")


def resume_or_start(out: Path, settings: dict[str, Any]) -> PrepareState:
    """The state that an earlier run with these settings left in `out`, or a new one.

    Settings may change only before the first shard is written.
    """
    settings = json.loads(json.dumps(settings))
    if (out / PROGRESS).exists():
        state = _read(out)
        changed = [key for key in settings if state.settings.get(key) != settings[key]]
        if not changed:
            return state
        if state.chunks > 0:
            what = ", ".join(_change(key, state.settings.get(key), settings[key]) for key in changed)
            raise DataError(f"{out} was prepared with different settings ({what}): use a new folder, or those settings")
    (out / shards.TOKENIZER).unlink(missing_ok=True)
    state = PrepareState(settings)
    state.write(out)
    return state


def _read(out: Path) -> PrepareState:
    path = out / PROGRESS
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = {split: [Shard(**row) for row in data[split]] for split in SPLITS}
        return PrepareState(**{**data, "place": SourcePosition(*data["place"]), **rows})
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} cannot be read ({error!r}): remove {out} and prepare again") from None


def _change(key: str, before: Any, now: Any) -> str:
    if key != "parts":
        return f"{key} {before!r} → {now!r}"
    files = sorted({name for name, _ in {*map(tuple, before)} ^ {*map(tuple, now)}})
    return f"files or sizes in the source have changed: {', '.join(files[:3])}{' …' if len(files) > 3 else ''}"


def is_held_out(text: str, share: float) -> bool:
    """Whether a document is for validation, by a hash of its text: all copies are in the same split."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


class _Counter:
    """Shows the progress of a stage: documents and tokens of the source so far, characters/s of this process."""

    def __init__(
        self, stage: str, parts: Sequence[SourcePart], state: PrepareState, show: Show, sizes: Sequence[int] = ()
    ):
        """`sizes`: the bytes of text in each part, if they are known and all will be read."""
        self.stage, self.parts, self.show, self.sizes = stage, parts, show, sizes
        before = [*state.train, *state.validation]
        self.documents = sum(shard.documents for shard in before)
        self.tokens = sum(shard.tokens for shard in before)
        self.characters, self.began = 0, time.monotonic()
        self.part, self.read = state.place.part, 0  # bytes of this part
        self.show_state()

    def add(self, batch: Sequence[Document], tokens: int) -> None:
        self.documents += len(batch)
        self.tokens += tokens
        for document in batch:
            self.characters += len(document.text)
            self.read = len(document.text.encode()) + (self.read if document.after.part == self.part else 0)
            self.part = document.after.part
        self.show_state()

    def show_state(self) -> None:
        sizes, part = self.sizes, self.part
        fraction = (sum(sizes[:part]) + min(self.read, sizes[part])) / sum(sizes) if sizes else None
        seconds = max(time.monotonic() - self.began, 1e-9)
        self.show(
            f"{self.stage}: {self.parts[part].name} ({part + 1}/{len(self.parts)})  {self.documents:,} documents  "
            f"{short(self.tokens)} tokens  {short(self.characters / seconds)} characters/s  {duration(seconds)}",
            fraction,
        )


def _write_chunk(
    encoded: Iterator[tuple[Document, Tokens]], tokenizer: Tokenizer, settings: Settings, out: Path, state: PrepareState
) -> SourcePosition | None:
    """Write one shard of each split, about `shard_tokens` in total. -> the position in the source, None at its end"""
    dtype = shards.dtype_for(tokenizer.vocab_size)
    writers = {split: ShardWriter(out / f"{split}-{state.chunks:05d}.bin", dtype) for split in SPLITS}
    end = np.array([tokenizer.end_of_text], np.uint32)
    place = None
    written = 0
    for document, tokens in encoded:
        split: Split = "validation" if is_held_out(document.text, settings.held_out) else "train"
        writers[split].add(np.concatenate([tokens, end]))
        place = document.after
        written += len(tokens) + 1
        if written >= settings.shard_tokens:
            break
    for split, writer in writers.items():
        shard = writer.close()
        if shard is not None:
            getattr(state, split).append(shard)
    return place


def _documents(parts: Sequence[SourcePart], start: SourcePosition) -> Iterator[Document]:
    """All nonempty documents from `start` on."""
    for number, part in enumerate(parts[start.part :], start=start.part):
        skip = start.documents if number == start.part else 0
        for count, text in enumerate(itertools.islice(part.documents(), skip, None), start=skip + 1):
            if text:
                yield Document(text, SourcePosition(number, count))


def _encoded(
    documents: Iterator[Document], tokenizer: Tokenizer, counter: _Counter
) -> Iterator[tuple[Document, Tokens]]:
    """Each document with its tokens; the next batches are read and tokenized while one is written."""
    pending: deque[tuple[list[Document], Future[list[Tokens]]]] = deque()

    def first() -> Iterator[tuple[Document, Tokens]]:
        batch, future = pending.popleft()
        tokens = future.result()
        yield from zip(batch, tokens, strict=True)
        counter.add(batch, sum(map(len, tokens)) + len(batch))

    with ThreadPoolExecutor(BATCHES_AHEAD) as pool:
        for batch in _batches(documents):
            pending.append((batch, pool.submit(tokenizer.encode_batch, [document.text for document in batch])))
            if len(pending) > BATCHES_AHEAD:
                yield from first()
        while pending:
            yield from first()


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


def _texts(parts: Sequence[SourcePart], show: Show) -> Iterator[str]:
    counter = _Counter("training the tokenizer", parts, PrepareState({}), show)
    for batch in _batches(_documents(parts, SourcePosition())):
        yield from (document.text for document in batch)
        counter.add(batch, 0)
