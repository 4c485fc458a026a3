"""Runs all requested measurements of a model. Each result is cached on disk as soon as it is measured.

The cache key of a result has the model's identity and everything else that determines the number, so a changed model or
changed data has a different key.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dualres.config.schema import ConfigError
from dualres.data.shards import read_index
from dualres.data.tokenizer import tokens_description
from dualres.evaluate import perplexity, zero_shot
from dualres.evaluate.batch_size import batch_for
from dualres.evaluate.documents import DocumentSource
from dualres.evaluate.perplexity import FirstToken, SourceScore
from dualres.evaluate.tasks import TaskDocuments
from dualres.evaluate.validation import ValidationScore, validation_loss
from dualres.evaluate.zero_shot import TaskScore
from dualres.hub.open_model import TrainedModel
from dualres.util.atomic_files import write_json
from dualres.util.errors import DataError, ModelError, TrainError
from dualres.util.optional_dependencies import MissingExtraError
from dualres.util.progress import Progress, Show, duration

CACHE = "cache"  # folder of the results
PROTOCOL = 1  # increment it when the way of measuring changes: all cached results become stale


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


class Measurement(NamedTuple):
    """A measurement to run; its result is a NamedTuple."""

    title: str  # in file names and progress lines
    key: Mapping[str, Any]  # everything that determines the result, for JSON
    run: Callable[[], Any]
    from_data: Callable[[Mapping[str, Any]], Any]  # builds the result from the fields in the file


def measure(
    model: TrainedModel, request: EvaluationRequest, out: Path, progress: Progress
) -> tuple[ModelResult, list[FailedMeasurement]]:
    """Run every measurement that is not cached in `out`. A failure does not stop the others."""
    results: list[Any] = []
    failures = []
    for measurement in measurements(model, request, progress.named(model.name)):
        what, start = f"{model.name}  {measurement.title}", time.monotonic()
        result, how = read_cached(out, measurement, progress.warn), "cached"
        if result is None:
            try:
                result = measurement.run()
            except (MissingExtraError, OSError):  # the others would fail as well
                raise
            except Exception as error:
                failures.append(FailedMeasurement(what, error))
                progress.warn(str(failures[-1]))
                continue
            write_cached(out, measurement, result)
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


def read_cached(out: Path, measurement: Measurement, say: Callable[[str], None]) -> Any | None:
    """The result cached in `out`; None if there is none, or if the file is damaged."""
    path = cache_path(out, measurement)
    try:
        cached = json.loads(path.read_bytes())
        if cached["key"] != _key(measurement) or cached["checksum"] != _checksum(cached["result"]):
            raise ValueError("wrong key or checksum")
        return measurement.from_data(cached["result"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        say(f"{path} is damaged ({error}): measuring {measurement.title} again")
        return None


def write_cached(out: Path, measurement: Measurement, result: Any) -> None:
    path = cache_path(out, measurement)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = result._asdict()
    write_json(path, {"key": _key(measurement), "checksum": _checksum(data), "result": data})


def cache_path(out: Path, measurement: Measurement) -> Path:
    """A file name with the title, for people, and a hash of the key."""
    title = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in measurement.title)
    return out / CACHE / f"{title[:80]}-{_checksum(_key(measurement))[:16]}.json"


def _key(measurement: Measurement) -> Any:
    return json.loads(json.dumps({"protocol": PROTOCOL, **measurement.key}))  # as it is read back: no tuples


def _checksum(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
