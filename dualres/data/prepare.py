"""From documents to token shards: streamed, on all cores, and taken up again where it was interrupted."""

import dataclasses
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dualres.data import shards
from dualres.data import tokenizer as tokenizers
from dualres.data.resume import PrepareState, SourcePosition, check_folder, resume_or_start
from dualres.data.shards import SPLITS, Index, ShardWriter, Split
from dualres.data.source import PYTHON, SourcePart, open_source
from dualres.data.tokenizer import Tokenizer, Tokens
from dualres.util.atomic_files import locked
from dualres.util.errors import DataError

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
    held_out: float = 0.05  # share of the documents, chosen by a hash of their text
    shard_tokens: int = 100_000_000

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise DataError(f"--held-out {self.held_out} is no share of the documents: use a number from 0 up to 1")
        if self.shard_tokens < 1:
            raise DataError(f"--shard-tokens {self.shard_tokens} is not positive: use 100000000")


class Report(NamedTuple):
    """How far a preparation is."""

    stage: str  # what is being done
    part: str
    parts_done: int
    parts: int
    documents: int  # since the source began
    tokens: int
    characters: int  # since this stage began


class Document(NamedTuple):
    """A text and where the source stands after it."""

    text: str
    after: SourcePosition


def prepare(settings: Settings, out: Path, report: Callable[[Report], None] = lambda _: None) -> Index:
    """Write the shards of a source to the folder `out`, and its index when all are there.

    A folder that has an index of the same settings is left as it is.
    """
    parts = open_source(settings.source, settings.field, settings.subset, settings.split)
    source = Path(settings.source)
    if settings.source != PYTHON and source.is_dir() and out.resolve().is_relative_to(source.resolve()):
        raise DataError(f"{out} lies inside its source {settings.source}: write the shards to another folder")
    out.mkdir(parents=True, exist_ok=True)
    check_folder(out)
    if (out / shards.INDEX).exists():
        return _prepare(settings, parts, out, report)
    with locked(out, DataError(f"another process prepares {out}: wait for it, or use a new folder")):
        return _prepare(settings, parts, out, report)


def _prepare(settings: Settings, parts: Sequence[SourcePart], out: Path, report: Callable[[Report], None]) -> Index:
    state = resume_or_start(out, {**dataclasses.asdict(settings), "parts": [[part.name, part.size] for part in parts]})
    if state is None:
        return shards.read_index(out)
    tokenizer = _tokenizer(settings, parts, out, state.tokenizer, report)
    counter = _Counter("tokenizing", parts, report, state)
    encoded = _encoded(_documents(parts, state.place), tokenizer, counter)
    while (place := _write_chunk(encoded, tokenizer, settings, out, state)) is not None:
        state.tokenizer, state.place, state.chunks = tokenizer.fingerprint, place, state.chunks + 1
        state.write(out)
    if not state.train:
        raise DataError(f"the source {settings.source} has no documents to train on: nothing was prepared")
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


def is_held_out(text: str, share: float) -> bool:
    """Whether a document belongs to the validation split: by its text, so that copies of it are on the same side."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


class _Counter:
    """Adds up what was done, for the report."""

    def __init__(self, stage: str, parts: Sequence[SourcePart], report: Callable[[Report], None], state: PrepareState):
        self.stage, self.parts, self.report = stage, parts, report
        before = [shard for split in SPLITS for shard in state.shards(split)]
        self.documents = sum(shard.documents for shard in before)
        self.tokens = sum(shard.tokens for shard in before)
        self.characters = 0
        self.show(state.place.part)

    def add(self, batch: Sequence[Document], tokens: int) -> None:
        self.documents += len(batch)
        self.tokens += tokens
        self.characters += sum(len(document.text) for document in batch)
        self.show(batch[-1].after.part)

    def show(self, part: int) -> None:
        name, parts = self.parts[part].name, len(self.parts)
        self.report(Report(self.stage, name, part, parts, self.documents, self.tokens, self.characters))


def _write_chunk(
    encoded: Iterator[tuple[Document, Tokens]], tokenizer: Tokenizer, settings: Settings, out: Path, state: PrepareState
) -> SourcePosition | None:
    """One shard of each split, of about `shard_tokens` together. -> where the source stands, None at its end"""
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
            state.shards(split).append(shard)
    return place


def _documents(parts: Sequence[SourcePart], start: SourcePosition) -> Iterator[Document]:
    """All documents but empty ones, from `start` on."""
    for number, part in enumerate(parts[start.part :], start=start.part):
        skip = start.documents if number == start.part else 0
        for count, text in enumerate(itertools.islice(part.documents(), skip, None), start=skip + 1):
            if text:
                yield Document(text, SourcePosition(number, count))


def _encoded(
    documents: Iterator[Document], tokenizer: Tokenizer, counter: _Counter
) -> Iterator[tuple[Document, Tokens]]:
    """Documents with their tokens, in order."""
    for batch, tokens in _tokenized(_batches(documents), tokenizer):
        yield from zip(batch, tokens, strict=True)
        counter.add(batch, sum(map(len, tokens)) + len(batch))


def _tokenized(
    batches: Iterator[list[Document]], tokenizer: Tokenizer
) -> Iterator[tuple[list[Document], list[Tokens]]]:
    """While one batch is written, the next are read and tokenized."""
    with ThreadPoolExecutor(BATCHES_AHEAD) as pool:
        waiting: deque[tuple[list[Document], Future[list[Tokens]]]] = deque()
        for batch in batches:
            waiting.append((batch, pool.submit(tokenizer.encode_batch, [document.text for document in batch])))
            if len(waiting) > BATCHES_AHEAD:
                ready, tokens = waiting.popleft()
                yield ready, tokens.result()
        for ready, tokens in waiting:
            yield ready, tokens.result()


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


def _tokenizer(
    settings: Settings,
    parts: Sequence[SourcePart],
    out: Path,
    began_with: str | None,
    report: Callable[[Report], None],
) -> Tokenizer:
    """The one that was asked for, stored in `out`; refused where shards were made with another, `began_with`."""
    path, name = out / shards.TOKENIZER, settings.tokenizer
    trained = name.startswith("bpe:")
    if name == "bytes":
        made = tokenizers.byte_tokenizer()
    elif name == "tekken":
        made = tokenizers.tekken()
    elif trained and path.exists():
        made = tokenizers.load(path)
    elif trained:
        if not name[4:].isdecimal():
            raise DataError(f"--tokenizer {name}: write bpe:4096, the number of entries after the colon")
        made = tokenizers.train_bpe(_texts(parts, report), int(name[4:]))
    elif Path(name).is_file():
        made = tokenizers.load(Path(name), settings.end_of_text)
    else:
        raise DataError(f"--tokenizer {name}: use bytes, bpe:4096, tekken, or the path of a tokenizer.json")
    if began_with not in (None, made.fingerprint):
        raise DataError(
            f"{path if trained else name} is not the tokenizer that {out} began with: restore it, or use a new folder"
        )
    made.save(path)
    return made


def _texts(parts: Sequence[SourcePart], report: Callable[[Report], None]) -> Iterator[str]:
    """What a tokenizer is trained on."""
    counter = _Counter("training the tokenizer", parts, report, PrepareState({}))
    for batch in _batches(_documents(parts, SourcePosition())):
        yield from (document.text for document in batch)
        counter.add(batch, 0)
