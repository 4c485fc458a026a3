"""All that is asked of a model, piece by piece: what was kept is taken, the rest is measured and kept."""

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dualres.config.schema import ConfigError
from dualres.data.shards import read_index
from dualres.data.tokenizer import tokens_description
from dualres.evaluate import cache, perplexity, zero_shot
from dualres.evaluate.batch_size import Batch, batch_for
from dualres.evaluate.cache import Piece
from dualres.evaluate.documents import Source
from dualres.evaluate.perplexity import FirstToken, SourceScore
from dualres.evaluate.task_documents import TaskDocuments
from dualres.evaluate.validation import ValidationScore, validation_loss
from dualres.evaluate.zero_shot import TaskScore
from dualres.hub.open_model import TrainedModel
from dualres.util.errors import DataError, ModelError, TrainError
from dualres.util.optional_dependencies import MissingExtraError
from dualres.util.progress import Progress, Show, duration


@dataclass(frozen=True)
class Asked:
    """What to measure, the same for all models."""

    validation: Path | None = None  # a prepared folder
    validation_tokens: int | None = None  # at most; None: all
    documents: str = ""  # how the sources are called together
    sources: tuple[Source, ...] = ()
    first_token: FirstToken = "scored"
    tasks: tuple[TaskDocuments, ...] = ()
    limit: int | None = None  # documents of a task
    rows: int | None = None  # of a batch; None: by memory


class ModelResult(NamedTuple):
    """What one model reached; None or left out where it was not asked for, or failed."""

    name: str
    identity: str
    tokenizer: str  # the same for the same tokenizer
    context: int
    validation: ValidationScore | None
    sources: tuple[SourceScore, ...]
    tasks: tuple[TaskScore, ...]


class Failure(NamedTuple):
    """A piece that could not be measured."""

    what: str
    error: Exception

    @property
    def in_words(self) -> str:
        """On one line; an error that is not of ours says its kind."""
        text = " ".join(str(self.error).split())
        kind = (
            ""
            if isinstance(self.error, ConfigError | DataError | ModelError | TrainError)
            else f"{type(self.error).__name__}: "
        )
        return f"dualres: {self.what} failed: {kind}{text}"


def measure(subject: TrainedModel, asked: Asked, out: Path, progress: Progress) -> tuple[ModelResult, list[Failure]]:
    """Every piece, each kept under `out` as soon as it is there. One that fails leaves the others alone."""
    results: list[Any] = []
    failures = []
    for piece in pieces(subject, asked, lambda text: progress.show(f"{subject.name}  {text}")):
        what = f"{subject.name}  {piece.title}"
        result = cache.read(out, piece, progress.say)
        if result is not None:
            progress.say(f"{what}: {_in_words(result)} (kept from before)")
            results.append(result)
            continue
        start = time.monotonic()
        try:
            result = piece.measure()
        except (MissingExtraError, OSError):  # the next piece would meet them too
            raise
        except Exception as error:
            failures.append(Failure(what, error))
            progress.say(failures[-1].in_words)
            continue
        cache.write(out, piece, result)
        progress.say(f"{what}: {_in_words(result)} ({duration(time.monotonic() - start)})")
        results.append(result)
    return _result(subject, results), failures


def pieces(subject: TrainedModel, asked: Asked, show: Show) -> list[Piece]:
    """What is asked of a model, with the keys under which it is kept."""
    batch = batch_for(subject, asked.rows)
    validation = [] if asked.validation is None else [_validation(subject, asked, asked.validation, batch, show)]
    sources = [_source(subject, asked, source, batch, show) for source in asked.sources]
    return [*validation, *sources, *(_task(subject, asked, documents, batch, show) for documents in asked.tasks)]


def _validation(subject: TrainedModel, asked: Asked, data: Path, batch: Batch, show: Show) -> Piece:
    tokens = asked.validation_tokens
    return Piece(
        "validation",
        _key(subject, measure="validation", content=read_index(data).content, tokens=tokens),
        lambda: validation_loss(subject, data, batch=batch, tokens=tokens, show=show),
        lambda score: score._asdict(),
        lambda found: ValidationScore(**found),
    )


def _source(subject: TrainedModel, asked: Asked, source: Source, batch: Batch, show: Show) -> Piece:
    first = asked.first_token
    return Piece(
        f"perplexity {source.name}",
        _key(subject, measure="perplexity", source=source.name, content=source.content, first_token=first),
        lambda: perplexity.score_source(subject, source, batch=batch, first_token=first, show=show),
        perplexity.as_data,
        perplexity.from_data,
    )


def _task(subject: TrainedModel, asked: Asked, documents: TaskDocuments, batch: Batch, show: Show) -> Piece:
    what = {"task": documents.task.name, "split": documents.split, "origin": documents.origin}
    version = zero_shot.harness_version()  # and with it the task's
    return Piece(
        f"zero-shot {documents.task.name}",
        _key(subject, measure="zero-shot", **what, content=documents.digest, harness=version, limit=asked.limit),
        lambda: zero_shot.score_task(subject, documents, batch=asked.rows or batch, limit=asked.limit, show=show),
        zero_shot.as_data,
        zero_shot.from_data,
    )


def _key(subject: TrainedModel, **what: Any) -> dict[str, Any]:
    return {"model": subject.identity, "context": subject.context, "prefix": subject.prefix, **what}


def tokenizer_digest(subject: TrainedModel) -> str:
    """The same for two tokenizers that make the same tokens of a text, whatever they add to it or decode to."""
    backend = subject.backend
    described = {} if backend is None else tokens_description(backend)
    vocabulary = subject.require_tokenizer().get_vocab() if backend is None else backend.get_vocab()
    text = json.dumps([described, sorted(vocabulary.items())], sort_keys=True)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def _result(subject: TrainedModel, results: list[Any]) -> ModelResult:
    return ModelResult(
        subject.name,
        subject.identity,
        tokenizer_digest(subject),
        subject.context,
        next((result for result in results if isinstance(result, ValidationScore)), None),
        tuple(result for result in results if isinstance(result, SourceScore)),
        tuple(result for result in results if isinstance(result, TaskScore)),
    )


def _in_words(result: Any) -> str:
    match result:
        case ValidationScore():
            return f"loss {result.loss:.4f}"
        case SourceScore():
            return f"token PPL {result.token_ppl:,.3f}, bits per byte {result.bits_per_byte:.4f}"
        case TaskScore():
            error = "" if result.printed.error is None else f" ± {100 * result.printed.error:.2f}"
            return f"{result.metric} {100 * result.printed.value:.2f}{error}"
    raise TypeError(f"no result: {result!r}")
