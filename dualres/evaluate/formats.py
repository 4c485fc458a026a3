"""Result tables as Markdown and LaTeX, and all results as JSON."""

import json
import re
from collections.abc import Sequence
from typing import Any

from dualres.config import paper
from dualres.evaluate import perplexity, zero_shot
from dualres.evaluate.documents import PALOMA
from dualres.evaluate.evaluation import EvaluationRequest, ModelResult
from dualres.evaluate.tables import REFERENCE, TEMPLATES, ResultTable, is_paloma, same_tokenizer, tables
from dualres.util.atomic_files import nonfinite_to_null
from dualres.util.templates import environment

LATEX_DELIMITERS = {  # Jinja's own are LaTeX's braces
    "variable_start_string": "<<",
    "variable_end_string": ">>",
    "block_start_string": "<%",
    "block_end_string": "%>",
    "comment_start_string": "<#",
    "comment_end_string": "#>",
}
_LATEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "<": "\\textless{}",
    ">": "\\textgreater{}",
    "±": "$\\pm$",
    "—": "--",
}


def render(models: Sequence[ModelResult], request: EvaluationRequest, form: str) -> str:
    """All results as markdown, latex or json."""
    if form == "json":
        return json.dumps(as_data(models, request), indent=1, ensure_ascii=False)
    write = {"markdown": markdown, "latex": latex}[form]
    return "\n\n".join(write(table) for table in tables(models, request))


def markdown(table: ResultTable) -> str:
    """A Markdown table with a heading, and the notes as a list."""
    template = environment(TEMPLATES, _escape_markdown).get_template("table.md")
    return template.render(table=table, reference=REFERENCE)


def latex(table: ResultTable) -> str:
    """A LaTeX table that uses `booktabs`, with the notes below it."""
    template = environment(TEMPLATES, _escape_latex, **LATEX_DELIMITERS).get_template("table.tex")
    return template.render(table=table, reference=REFERENCE)


def as_data(models: Sequence[ModelResult], request: EvaluationRequest) -> dict[str, Any]:
    """All numbers, how they were measured, the tables and the paper's rows; null for numbers that are not finite."""
    data = {
        "request": {
            "validation": None if request.validation is None else str(request.validation),
            "validation_tokens": request.validation_tokens,
            "documents": request.documents,
            "paloma": is_paloma(request),
            "first_token": request.first_token,
            "tasks": [
                {"name": d.task.name, "split": d.split, "origin": d.origin, "note": d.note} for d in request.tasks
            ],
            "limit": request.limit,
        },
        "same_tokenizer": same_tokenizer(models),
        "models": [_model_data(model, request) for model in models],
        "tables": [_table_data(table) for table in tables(models, request)],
        "paper": {
            "about": REFERENCE,
            "fit": [{"name": row.name, **_numbers(paper.FIT_COLUMNS, row.scores)} for row in paper.FIT],
            "paloma": [{"group": row.group, **_numbers(paper.PALOMA_METHODS, row.perplexity)} for row in paper.PALOMA],
            "zero_shot": [
                {"name": row.name, **_numbers(paper.ZERO_SHOT_COLUMNS, row.scores)} for row in paper.ZERO_SHOT
            ],
        },
    }
    return dict(nonfinite_to_null(data))


def _model_data(model: ModelResult, request: EvaluationRequest) -> dict[str, Any]:
    complete = model.sources if request.sources and len(model.sources) == len(request.sources) else None
    all_tasks = request.tasks and len(model.tasks) == len(request.tasks)
    return {
        **{name: getattr(model, name) for name in ("name", "identity", "tokenizer", "context")},
        "validation": None if model.validation is None else model.validation._asdict(),
        "sources": [{**perplexity.as_data(s), "group": PALOMA.get(s.name, s.name)} for s in model.sources],
        "pooled": None if complete is None else perplexity.as_data(perplexity.pooled(complete)),
        "macro": None if complete is None else perplexity.macro(complete)._asdict(),
        "tasks": [
            {**score._asdict(), "accuracies": {metric: a._asdict() for metric, a in score.accuracies.items()}}
            for score in model.tasks
        ],
        "average": zero_shot.average(model.tasks) if all_tasks else None,
    }


def _table_data(table: ResultTable) -> dict[str, Any]:
    rows, reference = ([[cell._asdict() for cell in row] for row in rows] for rows in (table.rows, table.reference))
    return {**table._asdict(), "rows": rows, "reference": reference}


def _escape_markdown(text: str) -> str:
    """Escape Markdown, including the bar, which would end a column; an underscore within a word needs no escape."""
    return re.sub(r"([\\|*`<\[]|\b_|_\b|(?<!\w)_)", r"\\\1", text)


def _escape_latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)


def _numbers(names: Sequence[str], texts: Sequence[str]) -> dict[str, float]:
    return {name: float(text.replace(",", "")) for name, text in zip(names, texts, strict=True)}
