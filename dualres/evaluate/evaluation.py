"""Runs all requested measurements of a model, using cached results where possible."""

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dualres.config.schema import ConfigError
from dualres.data.shards import read_index
from dualres.data.tokenizer import tokens_description
from dualres.evaluate import cache, perplexity, zero_shot
from dualres.evaluate.batch_size import batch_for
from dualres.evaluate.cache import Measurement
from dualres.evaluate.documents import DocumentSource
from dualres.evaluate.perplexity import FirstToken, SourceScore
from dualres.evaluate.tasks import TaskDocuments
from dualres.evaluate.validation import ValidationScore, validation_loss
from dualres.evaluate.zero_shot import TaskScore
from dualres.hub.open_model import TrainedModel
from dualres.util.errors import DataError, ModelError, TrainError
from dualres.util.optional_dependencies import MissingExtraError
from dualres.util.progress import Progress, Show, duration


@dataclass(frozen=True)
class EvaluationRequest:
    """What to measure, the same for all models."""

    validation: Path | None = None  # folder of `dualres prepare`
    validation_tokens: int | None = None  # at most; None: all
    documents: str = ""  # name of the file or folder of the sources
    sources: tuple[DocumentSource, ...] = ()
    first_token: FirstToken = "scored"
    tasks: tuple[TaskDocuments, ...] = ()
    limit: int | None = None  # documents per task
    rows: int | None = None  # per batch; None: chosen by memory


class ModelResult(NamedTuple):
    """The results of one model, without those that failed or were not requested."""

    name: str
    identity: str
    tokenizer: str  # digest
    context: int
    validation: ValidationScore | None
    sources: tuple[SourceScore, ...]
    tasks: tuple[TaskScore, ...]


class FailedMeasurement(NamedTuple):
    what: str
    error: Exception

    def __str__(self) -> str:
        """One line; with the type of an error that is not from dualres."""
        ours = isinstance(self.error, ConfigError | DataError | ModelError | TrainError)
        kind = "" if ours else f"{type(self.error).__name__}: "
        return f"dualres: {self.what} failed: {kind}{' '.join(str(self.error).split())}"


def measure(
    model: TrainedModel, request: EvaluationRequest, out: Path, progress: Progress
) -> tuple[ModelResult, list[FailedMeasurement]]:
    """Run every measurement that is not cached in `out`. A failure does not stop the others."""
    results: list[Any] = []
    failures = []
    for measurement in measurements(model, request, lambda text: progress.show(f"{model.name}  {text}")):
        what, start = f"{model.name}  {measurement.title}", time.monotonic()
        result, how = cache.read(out, measurement, progress.say), "cached"
        if result is None:
            try:
                result = measurement.run()
            except (MissingExtraError, OSError):  # the others would fail as well
                raise
            except Exception as error:
                failures.append(FailedMeasurement(what, error))
                progress.say(str(failures[-1]))
                continue
            cache.write(out, measurement, result)
            how = duration(time.monotonic() - start)
        progress.say(f"{what}: {result} ({how})")
        results.append(result)
    model_result = ModelResult(
        model.name,
        model.identity,
        tokenizer_digest(model),
        model.context,
        next((result for result in results if isinstance(result, ValidationScore)), None),
        tuple(result for result in results if isinstance(result, SourceScore)),
        tuple(result for result in results if isinstance(result, TaskScore)),
    )
    return model_result, failures


def measurements(model: TrainedModel, request: EvaluationRequest, show: Show) -> Iterator[Measurement]:
    """The requested measurements of a model, with the cache keys of their results."""
    batch, limit, first = batch_for(model, request.rows), request.limit, request.first_token
    common = {"model": model.identity, "context": model.context, "prefix": model.prefix}
    if (data := request.validation) is not None:
        tokens = request.validation_tokens
        yield Measurement(
            "validation",
            {**common, "measure": "validation", "content": read_index(data).content, "tokens": tokens},
            partial(validation_loss, model, data, batch=batch, tokens=tokens, show=show),
            lambda data: ValidationScore(**data),
        )
    for source in request.sources:
        specific = {"measure": "perplexity", "source": source.name, "content": source.content, "first_token": first}
        yield Measurement(
            f"perplexity {source.name}",
            {**common, **specific},
            partial(perplexity.score_source, model, source, batch=batch, first_token=first, show=show),
            lambda data: SourceScore(**data),
        )
    for documents in request.tasks:
        specific = {"measure": "zero-shot", "task": documents.task.name, "split": documents.split}
        specific |= {"origin": documents.origin, "content": documents.digest, "harness": zero_shot.harness_version()}
        yield Measurement(
            f"zero-shot {documents.task.name}",
            {**common, **specific, "limit": limit},
            partial(zero_shot.score_task, model, documents, batch=request.rows or batch, limit=limit, show=show),
            zero_shot.from_data,
        )


def tokenizer_digest(model: TrainedModel) -> str:
    """A hash that is equal for tokenizers that split text into the same tokens, whatever special tokens they add."""
    backend = model.backend
    description = {} if backend is None else tokens_description(backend)
    vocabulary = model.require_tokenizer().get_vocab() if backend is None else backend.get_vocab()
    text = json.dumps([description, sorted(vocabulary.items())], sort_keys=True)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
