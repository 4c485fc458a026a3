"""Perplexity of documents by source: per token and per byte, pooled as the paper does, and as a mean over sources.

Every document stands alone. Special tokens in its text are read as text, and none are added but the prefix.
"""
# B rows  T tokens  N tokens of all rows  V vocabulary

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualres.evaluate.batch_size import CHUNK_BYTES, Batch, kind_of
from dualres.evaluate.documents import Source, texts
from dualres.hub.open_model import TrainedModel
from dualres.util.errors import DataError
from dualres.util.progress import Show, short, silent

BUFFER = 2**21  # characters of documents that are tokenized together and sorted by length, to pad less
POOLED = "pooled"

FirstToken = Literal["scored", "skipped"]
Tokens = NDArray[np.int64]


class SourceScore(NamedTuple):
    """What a model makes of the documents of a source, or of several together."""

    name: str
    documents: int
    tokens: int  # that were scored
    bytes: int  # of the texts in UTF-8
    nats: float  # −Σ log p
    first_token: FirstToken
    context: int

    @property
    def token_ppl(self) -> float:
        """exp(nats / tokens)"""
        return _exp(self.nats / self.tokens)

    @property
    def byte_ppl(self) -> float:
        """exp(nats / bytes)"""
        return _exp(self.nats / self.bytes)

    @property
    def bits_per_byte(self) -> float:
        """log₂ of the byte perplexity"""
        return self.nats / self.bytes / math.log(2)


class Macro(NamedTuple):
    """Means over sources, each of which counts the same, however large it is."""

    sources: int
    token_ppl: float
    byte_ppl: float
    bits_per_byte: float


@dataclass(frozen=True)
class Window:
    """A run of a document's tokens: each but the first is predicted from those before it."""

    document: int  # from 1 on
    tokens: Tokens  # (T+1)

    def __len__(self) -> int:
        return len(self.tokens) - 1


def score_source(
    subject: TrainedModel,
    source: Source,
    *,
    batch: Batch,
    first_token: FirstToken = "scored",
    show: Show = silent,
) -> SourceScore:
    """The log-likelihood of every document of a source, each by itself.

    A document is cut into windows of `context` tokens.
    scored:  every token is predicted once: the first from the subject's prefix, that of a later window from the token
             before it, so a window reads at most `context` tokens.
    skipped: windows stand alone, without a prefix, and the first token of each is neither predicted nor counted.
    """
    check_vocabulary(subject)
    cut = CUTS[first_token]
    documents = tokens = 0
    nats, start = 0.0, time.monotonic()
    for buffer in _buffers(texts(source)):
        windows: list[Window] = []
        for number, row in enumerate(_tokenized(subject, buffer), start=documents + 1):
            windows += [Window(number, piece) for piece in cut(row, subject)]
        windows.sort(key=len, reverse=True)
        done = 0
        for scored in batch.over(windows, lambda piece: [*zip(piece, window_nats(subject, piece), strict=True)]):
            for window, value in scored:
                if not math.isfinite(value):
                    raise DataError(_not_finite(subject, source, window.document, value))
                nats += value
                tokens += len(window)
            done += len(scored)
            about = documents + len(buffer) * done // len(windows)  # documents are not scored in their order
            rate = short(tokens / max(1e-9, time.monotonic() - start))
            show(f"{source.name}  {about:,}/{source.documents:,} documents  {short(tokens)} tokens  {rate} tokens/s")
        documents += len(buffer)
    if tokens == 0:
        raise DataError(
            f"the source {source.name} has no token to score with {subject.name} (context {subject.context}, first "
            f"token {first_token}): its texts are too short, take it away or score first tokens too"
        )
    return SourceScore(source.name, documents, tokens, source.bytes, nats, first_token, subject.context)


def pooled(scores: Sequence[SourceScore]) -> SourceScore:
    """All sources as one: PPL = exp(−Σ_s Σ_t log p(x_{s,t}) / Σ_s N_s), the paper's aggregate, likewise for bytes."""
    ways = {(score.first_token, score.context) for score in scores}
    if len(ways) != 1:
        raise DataError(f"scores cannot be pooled that were made in different ways: {sorted(ways)}")
    [(first_token, context)] = ways
    return SourceScore(
        POOLED,
        sum(score.documents for score in scores),
        sum(score.tokens for score in scores),
        sum(score.bytes for score in scores),
        math.fsum(score.nats for score in scores),
        first_token,
        context,
    )


def macro(scores: Sequence[SourceScore]) -> Macro:
    """The mean of each measure over sources."""

    def mean(values: Iterator[float]) -> float:
        return math.fsum(values) / len(scores)

    return Macro(
        len(scores),
        mean(score.token_ppl for score in scores),
        mean(score.byte_ppl for score in scores),
        mean(score.bits_per_byte for score in scores),
    )


def as_data(score: SourceScore) -> dict[str, Any]:
    """For JSON, with the measures."""
    measures = {name: getattr(score, name) for name in ("token_ppl", "byte_ppl", "bits_per_byte")}
    return {**score._asdict(), **measures}


def from_data(data: Mapping[str, Any]) -> SourceScore:
    """What `as_data` gave."""
    return SourceScore(**{name: data[name] for name in SourceScore._fields})


def check_vocabulary(subject: TrainedModel) -> None:
    """Refuse a tokenizer that has token numbers which the model does not."""
    known = subject.vocab_size
    name, largest = max(subject.hf_tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if largest >= known:
        raise DataError(
            f"the tokenizer of {subject.name} has the token {name!r} with number {largest:,}, and the model has only "
            f"{known:,} entries: use the tokenizer that the model was trained with"
        )
    if not 0 <= subject.prefix < known:
        raise DataError(f"the prefix of {subject.name}, token {subject.prefix:,}, is none of the model's {known:,}")


def target_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """−log softmax(logits)[target], in float32 at least, a chunk of rows at a time. (N,V), (N) -> (N)"""
    precise = torch.promote_types(logits.dtype, torch.float32)
    rows = max(1, CHUNK_BYTES[kind_of(logits.device)] // (4 * logits.shape[-1]))
    found = []
    for piece, target in zip(logits.split(rows), targets.split(rows), strict=True):
        piece = piece.to(precise)
        found.append(piece.logsumexp(-1) - piece.gather(-1, target[:, None])[:, 0])
    return torch.cat(found)


@torch.no_grad()
def window_nats(subject: TrainedModel, windows: Sequence[Window]) -> list[float]:
    """Of all targets of each window. Rows are padded on the right, where a causal model does not look."""
    lengths = torch.tensor([len(window) for window in windows])
    rows = torch.full((len(windows), int(lengths.max()) + 1), subject.prefix)  # (B,T+1)
    for row, window in zip(rows, windows, strict=True):
        row[: len(window.tokens)] = torch.from_numpy(window.tokens)
    rows = rows.to(subject.device)
    logits = subject.logits(rows[:, :-1])  # (B,T,V)
    nats = target_nats(logits.flatten(0, 1), rows[:, 1:].flatten()).cpu().double().view(len(windows), -1)
    padding = torch.arange(nats.shape[1]) >= lengths[:, None]
    return nats.masked_fill(padding, 0).sum(-1).tolist()


def _scored(tokens: Tokens, subject: TrainedModel) -> Iterator[Tokens]:
    row = np.concatenate([[subject.prefix], tokens])
    for start in range(0, len(tokens), subject.context):
        yield row[start : start + subject.context + 1]


def _skipped(tokens: Tokens, subject: TrainedModel) -> Iterator[Tokens]:
    for start in range(0, len(tokens), subject.context):
        window = tokens[start : start + subject.context]
        if len(window) > 1:
            yield window


CUTS: dict[FirstToken, Callable[[Tokens, TrainedModel], Iterator[Tokens]]] = {"scored": _scored, "skipped": _skipped}


def _tokenized(subject: TrainedModel, documents: list[str]) -> Iterator[Tokens]:
    encoded = subject.hf_tokenizer(
        documents,
        add_special_tokens=False,
        split_special_tokens=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # documents longer than the context are expected
    )
    return (np.array(row, np.int64) for row in encoded["input_ids"])


def _buffers(documents: Iterator[str]) -> Iterator[list[str]]:
    buffer: list[str] = []
    size = 0
    for text in documents:
        buffer.append(text)
        size += len(text) + 1  # empty ones count too, there may be many
        if size >= BUFFER:
            yield buffer
            buffer, size = [], 0
    if buffer:
        yield buffer


def _not_finite(subject: TrainedModel, source: Source, document: int, value: float) -> str:
    return (
        f"{subject.name} gives document {document:,} of the source {source.name} a log-likelihood of {-value}: look at "
        "its weights, or run it in another dtype, float32 say"
    )


def _exp(value: float) -> float:
    """Beyond the largest number, infinite."""
    return math.exp(value) if value < 709 else math.inf
