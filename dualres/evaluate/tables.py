"""The paper's three evaluation tables with our models: language-model fit, perplexity by source, zero-shot accuracy.

The notes of a table tell how its numbers were measured, and what they cannot be compared with: `templates/*_notes.txt`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dualres.config import paper
from dualres.evaluate.documents import PALOMA
from dualres.evaluate.evaluation import EvaluationRequest, ModelResult
from dualres.evaluate.perplexity import MEASURES, macro, pooled
from dualres.evaluate.tasks import TASKS
from dualres.evaluate.zero_shot import Accuracy, average, harness_version
from dualres.util.templates import environment

EMPTY = "—"
REFERENCE = "the paper's 1B, not reproduced here"
TEMPLATES = Path(__file__).parent / "templates"
NOTES = environment(TEMPLATES, escape=lambda value: str(value).replace("\n", " "))  # a note is one line


class TableCell(NamedTuple):
    text: str
    error: str = ""  # standard error, printed after ±
    bold: bool = False


Rows = tuple[tuple[TableCell, ...], ...]
Columns = dict[str, list[TableCell]]  # measure -> one cell per model


class ResultTable(NamedTuple):
    """A table before it is rendered."""

    name: str
    title: str
    header: tuple[str, ...]
    rows: Rows  # the first cell is the row's name
    reference: Rows  # the paper's
    notes: tuple[str, ...]


def tables(models: Sequence[ModelResult], request: EvaluationRequest) -> list[ResultTable]:
    """The tables of the requested measures."""
    requested = {fit: request.validation or request.sources, by_source: request.sources, zero_shot: request.tasks}
    return [make(models, request) for make, measured in requested.items() if measured]


def is_paloma(request: EvaluationRequest) -> bool:
    """Whether the sources have the names of Paloma's sixteen."""
    return {source.name for source in request.sources} == set(PALOMA)


def same_tokenizer(models: Sequence[ModelResult]) -> bool:
    """Whether per-token numbers can be compared."""
    return len({model.tokenizer for model in models}) == 1


def comparable_per_byte(models: Sequence[ModelResult], request: EvaluationRequest) -> bool:
    """Whether per-byte numbers can be compared: if first tokens are skipped, only between equal windows."""
    same_windows = same_tokenizer(models) and len({model.context for model in models}) == 1
    return request.first_token == "scored" or same_windows


def fit(models: Sequence[ModelResult], request: EvaluationRequest) -> ResultTable:
    """Validation loss; perplexity per token and byte and bits per byte, pooled over sources and as their mean."""
    per_token = min if same_tokenizer(models) else None
    per_byte = min if comparable_per_byte(models, request) else None
    tokens = [model.validation and f"{model.validation.tokens:,} tokens" for model in models]
    columns: Columns = {}
    if request.validation is not None:
        losses = [None if model.validation is None else model.validation.loss for model in models]
        columns["Val. loss"] = _cells(losses, 3, per_token)
    if request.sources:
        complete = [model.sources if len(model.sources) == len(request.sources) else None for model in models]
        for aggregate, suffix in ((pooled, ""), (macro, ", macro")):
            scores: list[Any] = [None if sources is None else aggregate(sources) for sources in complete]
            for name, measure in zip(paper.FIT_COLUMNS[1:], MEASURES, strict=True):
                values = [None if score is None else getattr(score, measure) for score in scores]
                columns[name + suffix] = _cells(values, 3, per_token if measure == "token_ppl" else per_byte)
    return ResultTable(
        "fit",
        "Language-model fit" + (f": {_describe_sources(request)}" if request.sources else ""),
        ("Model", *columns),
        _model_rows(models, columns),
        _paper_rows(paper.FIT, paper.FIT_COLUMNS, columns),
        _notes("fit", models, request, validation_tokens=_by_model(models, tokens)),
    )


def by_source(models: Sequence[ModelResult], request: EvaluationRequest) -> ResultTable:
    """Token perplexity of every source; Paloma's in the paper's order and under its names."""
    printed = {row.group: row.perplexity for row in paper.PALOMA}
    names = [source.name for source in request.sources]
    known = [name for name in PALOMA if name in names]
    methods = [f"paper's {name}" for name in paper.PALOMA_METHODS] if known else []
    rows = []
    for name in [*known, *(name for name in names if name not in PALOMA)]:
        values = [next((s.token_ppl for s in model.sources if s.name == name), None) for model in models]
        theirs = printed[PALOMA[name]] if name in PALOMA else [EMPTY for _ in methods]
        ours = _cells(values, 2, min if same_tokenizer(models) else None)
        rows.append((TableCell(PALOMA.get(name, name)), *ours, *(TableCell(text) for text in theirs)))
    return ResultTable(
        "sources",
        f"Token perplexity by source: {_describe_sources(request)}",
        ("Source", *(model.name for model in models), *methods),
        tuple(rows),
        (),
        _notes("sources", models, request, known=known),
    )


def zero_shot(models: Sequence[ModelResult], request: EvaluationRequest) -> ResultTable:
    """Accuracy in percent on every task, and the unweighted mean."""
    names = {documents.task.name for documents in request.tasks}
    tasks = [task for task in TASKS if task.name in names]
    columns = {task.title: _accuracy_cells(_accuracies(models, task.name, task.metric)) for task in tasks}
    means = [Accuracy(average(m.tasks), None) if len(m.tasks) == len(tasks) else None for m in models]
    columns["Avg." if len(tasks) == len(TASKS) else f"Avg. of {len(tasks)}"] = _accuracy_cells(means)
    if "social_iqa" in names:
        columns["SocialIQA acc"] = _accuracy_cells(_accuracies(models, "social_iqa", "acc"))
    return ResultTable(
        "zero-shot",
        "Zero-shot accuracy in percent"
        + (f", first {request.limit:,} documents of each task" if request.limit else ""),
        ("Model", *columns),
        _model_rows(models, columns),
        _paper_rows(paper.ZERO_SHOT, paper.ZERO_SHOT_COLUMNS, columns),
        _zero_shot_notes(models, request),
    )


def _zero_shot_notes(models: Sequence[ModelResult], request: EvaluationRequest) -> tuple[str, ...]:
    scores = [score for model in models for score in model.tasks]
    places: dict[str, list[str]] = {}
    truncated = []
    counts = {score.task: f" {score.documents:,}" for score in scores}
    for d in request.tasks:
        text = f"{d.task.title}{counts.get(d.task.name, '')}" + (f" ({d.note})" if d.note else "")
        places.setdefault(f"{d.split} of {d.origin}", []).append(text)
        cuts = [next((f"{s.cut:,}" for s in model.tasks if s.task == d.task.name), None) for model in models]
        if {*cuts} - {None, "0"}:
            truncated.append(f"{d.task.title} {_by_model(models, cuts)}")
    return _notes(
        "zero_shot",
        models,
        request,
        harness=", ".join(dict.fromkeys(score.harness for score in scores)) or harness_version(),
        metrics={m: [d.task.title for d in request.tasks if d.task.metric == m] for m in ("acc_norm", "acc")},
        places=places,
        other_split=[d.task for d in request.tasks if d.split != d.task.split],
        truncated=truncated,
    )


def _notes(table: str, models: Sequence[ModelResult], request: EvaluationRequest, **facts: Any) -> tuple[str, ...]:
    """The lines of the table's template."""
    text = NOTES.get_template(f"{table}_notes.txt").render(
        request=request,
        contexts=_by_model(models, [f"{model.context:,} tokens" for model in models]),
        is_paloma=is_paloma(request),
        same_tokenizer=same_tokenizer(models),
        comparable_per_byte=comparable_per_byte(models, request),
        **facts,
    )
    return tuple(text.strip("\n").split("\n"))


def _describe_sources(request: EvaluationRequest) -> str:
    """The sources, for a title."""
    if is_paloma(request):
        return f"the sixteen Paloma sources in {request.documents}"
    count = len(request.sources)
    return f"{count} {'source' if count == 1 else 'sources'} in {request.documents} (not Paloma)"


def _by_model(models: Sequence[ModelResult], texts: Sequence[str | None]) -> str:
    """One text if it is the same for all models, otherwise each with the model's name."""
    named = [(model.name, text) for model, text in zip(models, texts, strict=True) if text is not None]
    if len({text for _, text in named}) <= 1:
        return named[0][1] if named else "no tokens"
    return ", ".join(f"{text} ({name})" for name, text in named)


def _model_rows(models: Sequence[ModelResult], columns: Columns) -> Rows:
    return tuple((TableCell(model.name), *(cells[i] for cells in columns.values())) for i, model in enumerate(models))


def _paper_rows(printed: Sequence[paper.PrintedScores], names: Sequence[str], columns: Columns) -> Rows:
    rows = [(row.name, dict(zip(names, row.scores, strict=True))) for row in printed]
    return tuple(
        (TableCell(name), *(TableCell(scores.get(column, EMPTY)) for column in columns)) for name, scores in rows
    )


def _accuracies(models: Sequence[ModelResult], task: str, metric: str) -> list[Accuracy | None]:
    return [next((score.accuracies[metric] for score in m.tasks if score.task == task), None) for m in models]


def _cells(values: Sequence[float | None], digits: int, best: Callable[..., str] | None) -> list[TableCell]:
    """Cells with the best of at least two in bold, by printed digits; `best` is None if they are not comparable."""
    texts = [EMPTY if value is None else f"{value:,.{digits}f}" for value in values]
    printed = [text for text in texts if text != EMPTY]
    bold = best(printed, key=lambda text: float(text.replace(",", ""))) if best and len(printed) > 1 else None
    return [TableCell(text, bold=text == bold) for text in texts]


def _accuracy_cells(accuracies: Sequence[Accuracy | None]) -> list[TableCell]:
    """Accuracies in percent, with standard errors."""
    cells = _cells([None if a is None else 100 * a.value for a in accuracies], 2, max)
    errors = ["" if a is None or a.error is None else f"{100 * a.error:.2f}" for a in accuracies]
    return [cell._replace(error=error) for cell, error in zip(cells, errors, strict=True)]
