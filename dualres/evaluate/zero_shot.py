"""Zero-shot accuracy through lm-evaluation-harness, with its default formulation of every task."""

import copy
import importlib.metadata
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dualres.config.schema import ConfigError
from dualres.evaluate.batch_size import MOST_ROWS, Batch
from dualres.evaluate.perplexity import check_vocabulary
from dualres.evaluate.task_documents import TaskDocuments
from dualres.hub.open_model import TrainedModel
from dualres.util.errors import DataError
from dualres.util.optional_dependencies import need
from dualres.util.progress import Show, silent

PURPOSE = "zero-shot evaluation"
NOISY = "lm_eval", "transformers", "datasets", "huggingface_hub", "httpx"
# The stock social_iqa has only acc; the paper prints acc_norm.
ADDED_METRICS = {"social_iqa": ("acc", "acc_norm")}


class Accuracy(NamedTuple):
    """One metric, between 0 and 1."""

    value: float
    error: float | None  # standard error over documents; none of a single document


class TaskScore(NamedTuple):
    """What a model reached on one task."""

    task: str  # the harness's name
    metric: str  # that the tables print
    accuracies: Mapping[str, Accuracy]  # acc and, where the task has it, acc_norm
    documents: int
    limit: int | None  # only the first so many documents were asked for
    cut: int  # answers whose prompt lost its beginning, for it was longer than the context
    split: str
    origin: str  # of the documents
    note: str  # what differs from the hub's documents
    harness: str  # version
    version: str  # of the task

    @property
    def printed(self) -> Accuracy:
        """The metric that the tables print."""
        return self.accuracies[self.metric]


def harness_version() -> str:
    """Of lm-evaluation-harness, without importing it."""
    try:
        return importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError:
        need("lm_eval", "evaluate", PURPOSE)
        raise


def score_task(
    subject: TrainedModel,
    documents: TaskDocuments,
    *,
    batch: int | Batch,
    limit: int | None = None,
    show: Show = silent,
) -> TaskScore:
    """Accuracy of the answers that the model finds likeliest: acc by log-likelihood, acc_norm by that per character.

    A prompt that is longer than the subject's context loses its beginning. `limit` takes the first documents only. A
    `batch` is so many rows, or as many of the task's longest prompt as have its tokens; one that does not fit into a
    GPU's memory is halved.
    """
    check_vocabulary(subject)
    while True:
        watch = _Watch(documents.task.name, subject, batch, show)
        try:
            return _score_task(subject, documents, watch, limit)
        except torch.OutOfMemoryError:
            if watch.rows == 1:
                raise
        batch = watch.rows // 2  # here the error is gone, and with it the tensors that its traceback held
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _score_task(subject: TrainedModel, documents: TaskDocuments, watch: "_Watch", limit: int | None) -> TaskScore:
    evaluator = need("lm_eval.evaluator", "evaluate", PURPOSE)
    huggingface = need("lm_eval.models.huggingface", "evaluate", PURPOSE)
    name = documents.task.name
    with quiet():
        task = harness_task(documents, limit)
        tokenizer = subject.hf_tokenizer  # the harness gives it a padding token, if need be a new one
        model = huggingface.HFLM(
            pretrained=subject.hf_model,
            tokenizer=tokenizer if tokenizer.pad_token else copy.deepcopy(tokenizer),
            backend="causal",
            batch_size=watch.rows,
            max_length=subject.context,
            prefix_token_id=subject.prefix,
        )
        watch.look_on(model)
        found = evaluator.evaluate(model, {"tasks": {name: task}}, limit=limit, log_samples=False)
    metrics = found["results"][name]
    accuracies = {
        metric: Accuracy(metrics[f"{metric},none"], _number(metrics[f"{metric}_stderr,none"]))
        for metric in ("acc", "acc_norm")
        if f"{metric},none" in metrics
    }
    version = str(found["versions"][name]) + (" with acc_norm added" if name in ADDED_METRICS else "")
    return TaskScore(
        task=name,
        metric=documents.task.metric,
        accuracies=accuracies,
        documents=found["n-samples"][name]["effective"],
        limit=limit,
        cut=watch.cut,
        split=documents.split,
        origin=documents.origin,
        note=documents.note,
        harness=harness_version(),
        version=version,
    )


def average(scores: Sequence[TaskScore]) -> float:
    """The unweighted mean over tasks of the metrics that the tables print."""
    return math.fsum(score.printed.value for score in scores) / len(scores)


def as_data(score: TaskScore) -> dict[str, Any]:
    """For JSON."""
    accuracies = {metric: accuracy._asdict() for metric, accuracy in score.accuracies.items()}
    return {**score._asdict(), "accuracies": accuracies}


def from_data(data: Mapping[str, Any]) -> TaskScore:
    """The score that `as_data` wrote."""
    score = TaskScore(**{**data, "accuracies": {key: Accuracy(**value) for key, value in data["accuracies"].items()}})
    if not isinstance(score.printed.value, float):
        raise ValueError(f"{score.metric} of {score.task} is {score.printed.value!r}, not a number")
    return score


def harness_task(documents: TaskDocuments, limit: int | None) -> Any:
    """The stock task, with our documents in place of the hub's; no more of them than are asked for."""
    tasks = need("lm_eval.tasks", "evaluate", PURPOSE)
    task = documents.task
    folder = Path(tasks.__file__).parent / task.folder  # to index all of the harness's folders takes half a minute
    manager = tasks.TaskManager(include_defaults=False, include_path=folder)
    changes: dict[str, Any] = {}
    if task.name in ADDED_METRICS:
        changes["metric_list"] = [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ADDED_METRICS[task.name]
        ]
    if documents.rows is not None:
        datasets = need("datasets", "evaluate", PURPOSE)
        split = datasets.DatasetDict({documents.split: datasets.Dataset.from_list(list(documents.rows[:limit]))})
        splits = {f"{name}_split": name if name == documents.split else None for name in ("validation", "test")}
        changes |= {"custom_dataset": lambda **_: split, "training_split": None, **splits}
    try:
        # A task in a group takes over the stock YAML; one on its own does not.
        loaded = manager.load([{"group": "dualres", "task": [{"task": task.name, **changes}]}])
    except Exception as error:
        if documents.rows is not None:
            raise
        why = " ".join(str(error).split())  # no network, a dataset that has moved: `datasets` raises many kinds
        raise DataError(
            f"the documents of {task.name} cannot be read from the hub ({task.hub}), use --tasks-from olmo or a folder "
            f"with them: {type(error).__name__}: {why}"
        ) from None
    harness_task = loaded["tasks"][task.name]
    harness_task.set_config(key="num_fewshot", value=0)
    return harness_task


class _Watch:
    """Looks on while the harness scores: what does not fit, and how far it has come."""

    def __init__(self, task: str, subject: TrainedModel, batch: int | Batch, show: Show):
        self.task, self.subject, self.context, self.show = task, subject.name, subject.context, show
        self.batch, self.rows = batch, batch if isinstance(batch, int) else 1  # until the prompts are known
        self.answers = self.done = self.cut = 0

    def look_on(self, model: Any) -> None:
        """Stand between the harness's model and what it is asked."""
        self.model, self.score = model, model._loglikelihood_tokens
        model._loglikelihood_tokens = self.tokens
        model.set_cache_hook(self)

    def tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: Any) -> Any:
        """All answers of a task, tokenized: (texts, prompt, answer)."""
        self.answers = len(requests)
        longest = max(len(answer) for _, _, answer in requests)
        if longest > self.context:
            raise ConfigError(
                f"{self.task} has an answer of {longest} tokens and the context is {self.context}: leave the "
                "task out of --zero-shot, or use a model or --context that reads as much"
            )
        # The last token is predicted, and so not read.
        self.cut = sum(len(prompt) + len(answer) > self.context + 1 for _, prompt, answer in requests)
        if isinstance(self.batch, Batch):
            row = min(self.context, max(len(prompt) + len(answer) for _, prompt, answer in requests))
            self.rows = max(1, min(MOST_ROWS, self.batch.tokens // row))
            self.model.batch_size_per_gpu = self.rows
        return self.score(requests, **options)

    def add_partial(self, kind: str, request: object, answer: tuple[float, bool]) -> None:
        """One answer is scored: the harness tells it to what it takes for a cache."""
        if not math.isfinite(answer[0]):
            raise DataError(
                f"{self.subject} gives an answer of {self.task} a log-likelihood of {answer[0]}: look at its weights, "
                "or run it in another dtype, float32 say"
            )
        self.done += 1
        self.show(f"{self.task}  {self.done:,}/{self.answers:,} answers")


@contextmanager
def quiet() -> Iterator[None]:
    """Without the harness's warnings and progress bars; ours say what matters."""
    tqdm = need("tqdm", "evaluate", PURPOSE).tqdm
    begin, levels = tqdm.__init__, {name: logging.getLogger(name).level for name in NOISY}

    def silent(self: Any, *given: Any, **options: Any) -> None:
        begin(self, *given, **{**options, "disable": True})

    try:
        tqdm.__init__ = silent
        for name in NOISY:
            logging.getLogger(name).setLevel(logging.ERROR)
        yield
    finally:
        tqdm.__init__ = begin
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _number(value: Any) -> float | None:
    """The harness writes N/A where it has none."""
    return float(value) if isinstance(value, int | float) else None
