"""Zero-shot accuracy with lm-evaluation-harness, in its default formulation of every task."""

import copy
import importlib.metadata
import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dualres.config.schema import ConfigError
from dualres.evaluate.batch_size import MAX_ROWS, Batch, run_halving
from dualres.evaluate.perplexity import check_vocabulary
from dualres.evaluate.tasks import TaskDocuments
from dualres.hub.open_model import TrainedModel
from dualres.util.errors import DataError
from dualres.util.optional_dependencies import need
from dualres.util.progress import Show, silent

PURPOSE = "zero-shot evaluation"
# The harness reports only acc for social_iqa; the paper prints acc_norm.
ADDED_METRICS = {"social_iqa": ("acc", "acc_norm")}


class Accuracy(NamedTuple):
    """One metric, between 0 and 1."""

    value: float
    error: float | None  # standard error over documents; None for a single document


class TaskScore(NamedTuple):
    """The result of one model on one task."""

    task: str  # the harness's name
    metric: str  # printed in the tables
    accuracies: Mapping[str, Accuracy]  # acc and, where the task has it, acc_norm
    documents: int
    cut: int  # answers with a prompt truncated on the left to fit into the context
    harness: str  # version
    version: str  # of the task

    @property
    def printed(self) -> Accuracy:
        """The metric that the tables print."""
        return self.accuracies[self.metric]

    def __str__(self) -> str:
        error = "" if self.printed.error is None else f" ± {100 * self.printed.error:.2f}"
        return f"{self.metric} {100 * self.printed.value:.2f}{error}"


def harness_version() -> str:
    """The version of lm-evaluation-harness, which is not imported: that would change settings of huggingface_hub."""
    try:
        return importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError:
        need("lm_eval", "evaluate", PURPOSE)
        raise


def score_task(
    model: TrainedModel,
    documents: TaskDocuments,
    *,
    batch: int | Batch,
    limit: int | None = None,
    show: Show = silent,
) -> TaskScore:
    """Accuracy of the most likely answers: acc by log-likelihood, acc_norm by log-likelihood per character.

    Prompts that exceed the model's context are truncated on the left. `limit` scores only the first documents. `batch`
    is a number of rows, or a token budget that is divided by the task's longest prompt; a batch that runs out of GPU
    memory is halved.
    """
    check_vocabulary(model)
    evaluator = need("lm_eval.evaluator", "evaluate", PURPOSE)
    huggingface = need("lm_eval.models.huggingface", "evaluate", PURPOSE)
    name, tokenizer = documents.task.name, model.hf_tokenizer
    with quiet():
        task = harness_task(documents, limit)
        adapter = huggingface.HFLM(
            pretrained=model.hf_model,
            # The harness sets the padding token, and may add one.
            tokenizer=tokenizer if tokenizer.pad_token else copy.deepcopy(tokenizer),
            backend="causal",
            max_length=model.context,
            prefix_token_id=model.prefix,
        )
        hooks = _Hooks(adapter, documents.task.name, model, batch, show)
        output = evaluator.evaluate(adapter, {"tasks": {name: task}}, limit=limit, log_samples=False)
    metrics = output["results"][name]
    accuracies = {}
    for metric in ("acc", "acc_norm"):
        if f"{metric},none" in metrics:
            error = metrics[f"{metric}_stderr,none"]
            accuracies[metric] = Accuracy(metrics[f"{metric},none"], None if error == "N/A" else error)
    return TaskScore(
        task=name,
        metric=documents.task.metric,
        accuracies=accuracies,
        documents=output["n-samples"][name]["effective"],
        cut=hooks.cut,
        harness=harness_version(),
        version=str(output["versions"][name]) + (" with acc_norm added" if name in ADDED_METRICS else ""),
    )


def average(scores: Sequence[TaskScore]) -> float:
    """The unweighted mean over tasks of the metrics that the tables print."""
    return math.fsum(score.printed.value for score in scores) / len(scores)


def from_data(data: Mapping[str, Any]) -> TaskScore:
    """Rebuild a score from the JSON of `score._asdict()`, where tuples are lists."""
    return TaskScore(**{**data, "accuracies": {key: Accuracy(*value) for key, value in data["accuracies"].items()}})


def harness_task(documents: TaskDocuments, limit: int | None) -> Any:
    """The harness's task, with local documents instead of the Hub's; all documents are checked."""
    tasks = need("lm_eval.tasks", "evaluate", PURPOSE)
    name = documents.task.name
    folder = Path(tasks.__file__).parent / documents.task.folder  # indexing all folders takes half a minute
    manager = tasks.TaskManager(include_defaults=False, include_path=folder)
    changes: dict[str, Any] = {}
    if name in ADDED_METRICS:
        changes["metric_list"] = [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ADDED_METRICS[name]
        ]
    if documents.rows is not None:
        datasets = need("datasets", "evaluate", PURPOSE)
        split = datasets.DatasetDict({documents.split: datasets.Dataset.from_list(list(documents.rows[:limit]))})
        splits = {f"{name}_split": name if name == documents.split else None for name in ("validation", "test")}
        changes |= {"custom_dataset": lambda **_: split, "training_split": None, **splits}
    try:
        # Within a group, a task extends the harness's YAML; on its own it would replace it.
        loaded = manager.load([{"group": "dualres", "task": [{"task": name, **changes}]}])
    except Exception as error:  # `datasets` raises many types, such as for no network or a moved dataset
        remedy = "" if documents.rows is not None else "; use --tasks-from olmo or a local folder"
        raise DataError(f"{name} cannot be loaded from {documents.origin}{remedy}: {_describe(error)}") from None
    task = loaded["tasks"][name]
    task.set_config(key="num_fewshot", value=0)
    _check_documents(task, documents, limit)
    return task


def _check_documents(task: Any, documents: TaskDocuments, limit: int | None) -> None:
    """Raise for documents that the harness would silently score as wrong, or divide by zero for."""
    for number, document in enumerate(itertools.islice(task.task_docs, limit), start=1):
        where, remedy = f"document {number} of {documents.origin} ({documents.task.name})", "fix or remove it"
        try:
            choices, target = task.doc_to_choice(document), task.doc_to_target(document)
            # WinoGrande: the prompts are the choices, and the harness returns the correct one as the text.
            correct = task.doc_to_text(document) if task.multiple_input else target
            answers = [target] if task.multiple_input else choices
        except Exception as error:
            raise DataError(f"{where} cannot be read by the harness: {_describe(error)}; {remedy}") from None
        if not isinstance(correct, int) or not 0 <= correct < len(choices):
            raise DataError(f"{where} has the correct answer {correct!r}, outside its {len(choices)} choices: {remedy}")
        if not all(answer.strip() for answer in answers):
            raise DataError(f"{where} has an empty answer in {answers}: {remedy}")


class _Hooks:
    """Hooks into the harness while it scores: chooses the batch, counts truncated prompts, raises on NaN."""

    def __init__(self, adapter: Any, task: str, model: TrainedModel, batch: int | Batch, show: Show):
        self.task, self.model, self.context, self.batch, self.show = task, model.name, model.context, batch, show
        self.answers = self.done = self.cut = 0
        self.adapter, self.score = adapter, adapter._loglikelihood_tokens
        adapter._loglikelihood_tokens = self.loglikelihood_tokens
        adapter.set_cache_hook(self)

    def loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: Any) -> Any:
        """Called once with all tokenized answers of the task, as (texts, prompt, answer)."""
        self.answers = len(requests)
        longest = max(len(answer) for _, _, answer in requests)
        if longest > self.context:  # a bare `assert` in the harness
            raise ConfigError(
                f"{self.task} has an answer of {longest} tokens, but the context is {self.context}: remove the task "
                "from --zero-shot, or use a longer context"
            )
        # The last token is predicted, not read.
        self.cut = sum(len(prompt) + len(answer) > self.context + 1 for _, prompt, answer in requests)
        if isinstance(self.batch, Batch):
            row = min(self.context, max(len(prompt) + len(answer) for _, prompt, answer in requests))
            rows = max(1, min(MAX_ROWS, self.batch.tokens // row))
        else:
            rows = self.batch

        def score(rows: int) -> Any:
            self.done, self.adapter.batch_size_per_gpu = 0, rows
            return self.score(requests, **options)

        return run_halving(rows, score)[1]

    def add_partial(self, kind: str, request: object, answer: tuple[float, bool]) -> None:
        """Called after each answer: to the harness, this object is a cache."""
        if not math.isfinite(answer[0]):
            raise DataError(
                f"{self.model} assigns an answer of {self.task} a log-likelihood of {answer[0]}: check its weights, or "
                "use another dtype such as float32"
            )
        self.done += 1
        self.show(f"{self.task}  {self.done:,}/{self.answers:,} answers", self.done / self.answers)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and the progress bars of the harness, which has no option for all of them."""
    tqdm = need("tqdm", "evaluate", PURPOSE).tqdm
    original, level = tqdm.__init__, logging.root.manager.disable

    def disabled(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **{**options, "disable": True})

    try:
        tqdm.__init__ = disabled
        logging.disable(logging.WARNING)
        yield
    finally:
        tqdm.__init__ = original
        logging.disable(level)


def _describe(error: Exception) -> str:
    """The error's type and message on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
