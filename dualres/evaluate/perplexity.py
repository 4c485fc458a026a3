"""Perplexity of documents by source: per token and per byte, pooled as in the paper, and as a mean over sources.

Every document is scored on its own. Special tokens in its text are treated as text; only the prefix is added.
"""
# B rows  T tokens  N tokens of all rows  V vocabulary

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualres.evaluate.batch_size import CHUNK_BYTES, Batch, device_kind
from dualres.evaluate.documents import DocumentSource, texts
from dualres.hub.open_model import TrainedModel
from dualres.util.errors import DataError
from dualres.util.progress import Show, short, silent

BUFFER = 2**21  # characters of documents that are tokenized together, and sorted by length for less padding
MEASURES = ("token_ppl", "byte_ppl", "bits_per_byte")

FirstToken = Literal["scored", "skipped"]
TokenIds = NDArray[np.int64]


class SourceScore(NamedTuple):
    """The log-likelihood of the documents of one source, or of several sources pooled."""

    name: str
    documents: int
    tokens: int  # scored
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

    def __str__(self) -> str:
        return f"token PPL {self.token_ppl:,.3f}, bits per byte {self.bits_per_byte:.4f}"


class MacroScore(NamedTuple):
    """Unweighted means over sources."""

    sources: int
    token_ppl: float
    byte_ppl: float
    bits_per_byte: float


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of a document: each but the first is predicted from those before it."""

    document: int  # from 1
    tokens: TokenIds  # (T+1)

    def __len__(self) -> int:
        return len(self.tokens) - 1


def score_source(
    model: TrainedModel,
    source: DocumentSource,
    *,
    batch: Batch,
    first_token: FirstToken = "scored",
    show: Show = silent,
) -> SourceScore:
    """Score every document of a source in non-overlapping windows of `context` tokens.

    scored:  every token is predicted once: the first of a document from the model's prefix, the first of a later
             window from the token before it.
    skipped: windows are independent, and the first token of each is neither predicted nor counted.
    """
    check_vocabulary(model)
    documents = tokens = 0
    nats, start = 0.0, time.monotonic()
    for buffer in _buffers(texts(source)):
        windows: list[Window] = []
        for number, row in enumerate(_tokenized(model, buffer), start=documents + 1):
            windows += [Window(number, piece) for piece in _windows(row, model, first_token)]
        windows.sort(key=len, reverse=True)
        done = 0
        for scored in batch.map(windows, lambda piece: [*zip(piece, window_nats(model, piece), strict=True)]):
            for window, value in scored:
                if not math.isfinite(value):
                    raise DataError(
                        f"{model.name} assigns document {window.document:,} of the source {source.name} a "
                        f"log-likelihood of {-value}: check its weights, or use another dtype such as float32"
                    )
                nats += value
                tokens += len(window)
            done += len(scored)
            progress = documents + len(buffer) * done // len(windows)  # estimated: windows are sorted by length
            rate = short(tokens / max(1e-9, time.monotonic() - start))
            count = f"{progress:,}/{source.documents:,} documents  {short(tokens)} tokens"
            show(f"{source.name}  {count}  {rate} tokens/s", progress / source.documents)
        documents += len(buffer)
    if tokens == 0:
        raise DataError(
            f"the source {source.name} has no token to score with {model.name} (context {model.context}, first "
            f"token {first_token}): its texts are too short; remove it, or use --first-token scored"
        )
    return SourceScore(source.name, documents, tokens, source.bytes, nats, first_token, model.context)


def pooled(scores: Sequence[SourceScore]) -> SourceScore:
    """PPL = exp(−Σ_s Σ_t log p(x_{s,t}) / Σ_s N_s), the paper's aggregate; likewise per byte."""
    protocols = {(score.first_token, score.context) for score in scores}
    if len(protocols) != 1:
        raise DataError(f"scores of {sorted(protocols)} cannot be pooled: use one --context and one --first-token")
    [(first_token, context)] = protocols
    return SourceScore(
        "pooled",
        sum(score.documents for score in scores),
        sum(score.tokens for score in scores),
        sum(score.bytes for score in scores),
        math.fsum(score.nats for score in scores),
        first_token,
        context,
    )


def macro(scores: Sequence[SourceScore]) -> MacroScore:
    """The mean of each measure over sources."""
    return MacroScore(len(scores), *(fmean(getattr(score, measure) for score in scores) for measure in MEASURES))


def as_data(score: SourceScore) -> dict[str, Any]:
    """The score as JSON data, with the derived measures."""
    return {**score._asdict(), **{measure: getattr(score, measure) for measure in MEASURES}}


def check_vocabulary(model: TrainedModel) -> None:
    """Raise if the tokenizer has token ids beyond the model's vocabulary."""
    size = model.vocab_size
    name, largest = max(model.hf_tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if largest >= size:
        raise DataError(
            f"the tokenizer of {model.name} has the token {name!r} with id {largest:,}, but the model's vocabulary has "
            f"{size:,} entries: use the tokenizer that the model was trained with"
        )
    if not 0 <= model.prefix < size:
        token = f"the start token of {model.name}, {model.prefix:,}"
        raise DataError(f"{token}, is not in its vocabulary of {size:,}: use the tokenizer that it was trained with")


def target_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """−log softmax(logits)[target], in float32 or wider, in chunks of rows. (N,V), (N) -> (N)"""
    precise = torch.promote_types(logits.dtype, torch.float32)
    rows = max(1, CHUNK_BYTES[device_kind(logits.device)] // (4 * logits.shape[-1]))
    nats = []
    for piece, target in zip(logits.split(rows), targets.split(rows), strict=True):
        piece = piece.to(precise)
        nats.append(piece.logsumexp(-1) - piece.gather(-1, target[:, None])[:, 0])
    return torch.cat(nats)


@torch.no_grad()
def window_nats(model: TrainedModel, windows: Sequence[Window]) -> list[float]:
    """The sum over the targets of each window. Rows are padded on the right, which a causal model ignores."""
    lengths = torch.tensor([len(window) for window in windows])
    rows = torch.full((len(windows), int(lengths.max()) + 1), model.prefix)  # (B,T+1)
    for row, window in zip(rows, windows, strict=True):
        row[: len(window.tokens)] = torch.from_numpy(window.tokens)
    rows = rows.to(model.device)
    logits = model.logits(rows[:, :-1])  # (B,T,V)
    nats = target_nats(logits.flatten(0, 1), rows[:, 1:].flatten()).cpu().double().view(len(windows), -1)
    padding = torch.arange(nats.shape[1]) >= lengths[:, None]
    return nats.masked_fill(padding, 0).sum(-1).tolist()


def _windows(tokens: TokenIds, model: TrainedModel, first_token: FirstToken) -> Iterator[TokenIds]:
    scored = first_token == "scored"
    row = np.concatenate([[model.prefix], tokens]) if scored else tokens
    for start in range(0, len(tokens), model.context):
        window = row[start : start + model.context + scored]
        if len(window) > 1:
            yield window


def _tokenized(model: TrainedModel, documents: list[str]) -> Iterator[TokenIds]:
    encoded = model.hf_tokenizer(
        documents,
        add_special_tokens=False,
        split_special_tokens=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # no warning about documents beyond the context
    )
    return (np.array(row, np.int64) for row in encoded["input_ids"])


def _buffers(documents: Iterator[str]) -> Iterator[list[str]]:
    buffer: list[str] = []
    size = 0
    for text in documents:
        buffer.append(text)
        size += len(text) + 1  # bounds the number of empty documents
        if size >= BUFFER:
            yield buffer
            buffer, size = [], 0
    if buffer:
        yield buffer


def _exp(value: float) -> float:
    """The exponential, or infinity instead of an overflow."""
    return math.exp(value) if value < 709 else math.inf
