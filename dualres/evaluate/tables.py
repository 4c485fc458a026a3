"""The paper's three evaluation tables with our models in them: language-model fit, perplexity by source, zero-shot."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from dualres.config import paper
from dualres.evaluate import footnotes
from dualres.evaluate.documents import PALOMA, group_name
from dualres.evaluate.evaluation import Asked, ModelResult
from dualres.evaluate.perplexity import macro, pooled
from dualres.evaluate.tasks import TASKS
from dualres.evaluate.zero_shot import Accuracy, TaskScore, average

NOTHING = "—"
REFERENCE = "the paper's 1B, not reproduced here"
MEASURES = (("Token PPL", "token_ppl"), ("Byte PPL", "byte_ppl"), ("BPB", "bits_per_byte"))


class Cell(NamedTuple):
    """What stands in one place of a table."""

    text: str
    error: str = ""  # after a ±
    bold: bool = False


class Column(NamedTuple):
    """One measure of every model."""

    name: str
    cells: list[Cell]


class Table(NamedTuple):
    """One table, in no format yet."""

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]  # the first cell is the row's name
    reference: tuple[tuple[Cell, ...], ...]  # the paper's rows
    notes: tuple[str, ...]  # what was measured


def tables(models: Sequence[ModelResult], asked: Asked) -> list[Table]:
    """Those of the three that something was asked for."""
    made = []
    if asked.validation is not None or asked.sources:
        made.append(fit(models, asked))
    if asked.sources:
        made.append(by_source(models, asked))
    if asked.tasks:
        made.append(zero_shot(models, asked))
    return made


def fit(models: Sequence[ModelResult], asked: Asked) -> Table:
    """Validation loss; perplexity per token and byte and bits per byte, pooled over sources and as their mean."""
    per_token = footnotes.one_tokenizer(models)  # what is counted per token can be compared
    columns = []
    if asked.validation is not None:
        losses = [None if model.validation is None else model.validation.loss for model in models]
        columns.append(Column("Val. loss", _lowest([_digits(loss, 3) for loss in losses], per_token)))
    if asked.sources:
        whole = [model.sources if len(model.sources) == len(asked.sources) else None for model in models]
        for aggregate, ending in ((pooled, ""), (macro, ", macro")):
            found: list[Any] = [None if scores is None else aggregate(scores) for scores in whole]
            for name, measure in MEASURES:
                texts = [NOTHING if score is None else _digits(getattr(score, measure), 3) for score in found]
                comparable = per_token if measure == "token_ppl" else footnotes.per_byte(models, asked)
                columns.append(Column(name + ending, _lowest(texts, comparable)))
    return Table(
        "fit",
        "Language-model fit" + (f": {footnotes.sources(asked)}" if asked.sources else ""),
        ("Model", *(column.name for column in columns)),
        _rows(models, columns),
        _reference(paper.FIT, paper.FIT_COLUMNS, columns),
        footnotes.fit(models, asked),
    )


def by_source(models: Sequence[ModelResult], asked: Asked) -> Table:
    """Token perplexity of every source, in the paper's order and under its names where it has them."""
    order, printed = [*PALOMA], {row.group: row.perplexity for row in paper.PALOMA}
    names = [source.name for source in asked.sources]
    names = [
        *sorted((name for name in names if name in PALOMA), key=order.index),
        *(n for n in names if n not in PALOMA),
    ]
    methods = [f"paper's {name}" for name in paper.PALOMA_METHODS] if set(names) & set(order) else []
    rows = []
    for name in names:
        found = [next((score for score in model.sources if score.name == name), None) for model in models]
        texts = [NOTHING if score is None else _digits(score.token_ppl, 2) for score in found]
        theirs = printed[PALOMA[name]] if name in PALOMA else [NOTHING for _ in methods]
        ours = _lowest(texts, footnotes.one_tokenizer(models))
        rows.append((Cell(group_name(name)), *ours, *(Cell(text) for text in theirs)))
    return Table(
        "sources",
        f"Token perplexity by source: {footnotes.sources(asked)}",
        ("Source", *(model.name for model in models), *methods),
        tuple(rows),
        (),
        footnotes.by_source(models, asked),
    )


def zero_shot(models: Sequence[ModelResult], asked: Asked) -> Table:
    """Accuracy in percent on every task, and the unweighted mean."""
    names = {documents.task.name for documents in asked.tasks}
    tasks = [task for task in TASKS if task.name in names]
    columns = [Column(task.title, _highest([_of(model, task.name, task.metric) for model in models])) for task in tasks]
    means = [
        Accuracy(average(model.tasks), None) if len(model.tasks) == len(tasks) else None  # of failed tasks, none
        for model in models
    ]
    columns.append(Column("Avg." if len(tasks) == len(TASKS) else f"Avg. of {len(tasks)}", _highest(means)))
    if "social_iqa" in names:
        columns.append(Column("SocialIQA acc", _highest([_of(model, "social_iqa", "acc") for model in models])))
    return Table(
        "zero-shot",
        "Zero-shot accuracy in percent" + (f", first {asked.limit:,} documents of each task" if asked.limit else ""),
        ("Model", *(column.name for column in columns)),
        _rows(models, columns),
        _reference(paper.ZERO_SHOT, paper.ZERO_SHOT_COLUMNS, columns),
        footnotes.zero_shot(models, asked),
    )


def _rows(models: Sequence[ModelResult], columns: Sequence[Column]) -> tuple[tuple[Cell, ...], ...]:
    return tuple(
        (Cell(model.name), *(column.cells[number] for column in columns)) for number, model in enumerate(models)
    )


def _reference(
    printed: Sequence[paper.PrintedScores], names: Sequence[str], columns: Sequence[Column]
) -> tuple[tuple[Cell, ...], ...]:
    """The paper's rows; nothing where it has no such column."""
    found = [(row.name, dict(zip(names, row.scores, strict=True))) for row in printed]
    return tuple(
        (Cell(name), *(Cell(scores.get(column.name, NOTHING)) for column in columns)) for name, scores in found
    )


def _of(model: ModelResult, task: str, metric: str) -> Accuracy | None:
    score: TaskScore | None = next((score for score in model.tasks if score.task == task), None)
    return None if score is None else score.accuracies[metric]


def _digits(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}"


def _lowest(texts: Sequence[str], comparable: bool) -> list[Cell]:
    """Bold is the lowest of at least two, by what is printed: so are all that print the same."""
    values = {text: float(text.replace(",", "")) for text in texts if text != NOTHING}
    several = comparable and sum(text != NOTHING for text in texts) > 1
    best = min(values.values()) if several else None
    return [Cell(text, bold=best is not None and values.get(text) == best) for text in texts]


def _highest(accuracies: Sequence[Accuracy | None]) -> list[Cell]:
    """In percent, with their standard errors."""
    texts = [NOTHING if accuracy is None else f"{100 * accuracy.value:.2f}" for accuracy in accuracies]
    errors = ["" if found is None or found.error is None else f"{100 * found.error:.2f}" for found in accuracies]
    values = [float(text) for text in texts if text != NOTHING]
    best = f"{max(values):.2f}" if len(values) > 1 else None
    return [Cell(text, error, text == best) for text, error in zip(texts, errors, strict=True)]
