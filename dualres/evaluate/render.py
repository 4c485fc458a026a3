"""Tables as Markdown and LaTeX, and everything that was measured as JSON."""

import math
import re
from collections.abc import Sequence
from typing import Any

from dualres.config import paper
from dualres.evaluate import footnotes, perplexity, zero_shot
from dualres.evaluate.documents import group_name
from dualres.evaluate.evaluation import Asked, ModelResult
from dualres.evaluate.tables import REFERENCE, Cell, Table, tables

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


def markdown(table: Table) -> str:
    """With a heading, and the notes as a list."""

    def cell(given: Cell) -> str:
        text = _marked(given.text)
        text = f"**{text}**" if given.bold else text
        return f"{text} ± {given.error}" if given.error else text

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    lines = [f"### {_marked(table.title)}", "", line([_marked(name) for name in table.header])]
    lines.append(line(["---", *("---:" for _ in table.header[1:])]))
    lines += [line([cell(given) for given in row]) for row in table.rows]
    if table.reference:
        lines.append(line([f"*{REFERENCE}*", *("" for _ in table.header[1:])]))
        lines += [line([cell(given) for given in row]) for row in table.reference]
    return "\n".join([*lines, "", *(f"- {_marked(note)}" for note in table.notes)])


def latex(table: Table) -> str:
    """For `booktabs`, the notes beneath."""

    def cell(given: Cell) -> str:
        text = escaped(given.text)
        text = f"\\textbf{{{text}}}" if given.bold else text
        return f"{text} {{\\scriptsize$\\pm$ {given.error}}}" if given.error else text

    def line(cells: Sequence[str]) -> str:
        apart = "{}" if cells[0].startswith(("[", "*")) else ""  # which \\\\ of the line before would take for its own
        return f"{apart}{' & '.join(cells)} \\\\"

    lines = ["\\begin{table}[t]", "\\centering", "\\small", f"\\caption{{{escaped(table.title)}}}"]
    lines.append(f"\\label{{tab:{table.name}}}")
    lines += [f"\\begin{{tabular}}{{l{'r' * (len(table.header) - 1)}}}", "\\toprule"]
    lines += [line([escaped(name) for name in table.header]), "\\midrule"]
    lines += [line([cell(given) for given in row]) for row in table.rows]
    if table.reference:
        lines += ["\\midrule", f"\\multicolumn{{{len(table.header)}}}{{l}}{{\\emph{{{escaped(REFERENCE)}}}}} \\\\"]
        lines += [line([cell(given) for given in row]) for row in table.reference]
    lines += ["\\bottomrule", "\\end{tabular}", "\\par\\smallskip", "\\begin{minipage}{\\linewidth}\\footnotesize"]
    lines += [escaped(note) for note in table.notes]
    return "\n".join([*lines, "\\end{minipage}", "\\end{table}"])


def as_data(models: Sequence[ModelResult], asked: Asked) -> dict[str, Any]:
    """Every number with what it was measured by, the tables, the paper's rows; null where one is beyond all bounds."""
    data = {
        "asked": {
            "validation": None if asked.validation is None else str(asked.validation),
            "validation_tokens": asked.validation_tokens,
            "documents": asked.documents,
            "paloma": footnotes.is_paloma(asked),
            "first_token": asked.first_token,
            "tasks": [d.task.name for d in asked.tasks],
            "limit": asked.limit,
        },
        "same_tokenizer": footnotes.one_tokenizer(models),
        "models": [_model(model, asked) for model in models],
        "tables": [_table(table) for table in tables(models, asked)],
        "paper": {
            "about": REFERENCE,
            "fit": [{"name": row.name, **_numbers(paper.FIT_COLUMNS, row.scores)} for row in paper.FIT],
            "paloma": [{"group": row.group, **_numbers(paper.PALOMA_METHODS, row.perplexity)} for row in paper.PALOMA],
            "zero_shot": [
                {"name": row.name, **_numbers(paper.ZERO_SHOT_COLUMNS, row.scores)} for row in paper.ZERO_SHOT
            ],
        },
    }
    finite: dict[str, Any] = _finite(data)
    return finite


def escaped(text: str) -> str:
    """For LaTeX."""
    return "".join(_LATEX.get(letter, letter) for letter in text)


def _model(model: ModelResult, asked: Asked) -> dict[str, Any]:
    whole = model.sources if asked.sources and len(model.sources) == len(asked.sources) else None
    all_tasks = asked.tasks and len(model.tasks) == len(asked.tasks)
    return {
        **{name: getattr(model, name) for name in ("name", "identity", "tokenizer", "context")},
        "validation": None if model.validation is None else model.validation._asdict(),
        "sources": [{**perplexity.as_data(score), "group": group_name(score.name)} for score in model.sources],
        "pooled": None if whole is None else perplexity.as_data(perplexity.pooled(whole)),
        "macro": None if whole is None else perplexity.macro(whole)._asdict(),
        "tasks": [zero_shot.as_data(score) for score in model.tasks],
        "average": zero_shot.average(model.tasks) if all_tasks else None,
    }


def _table(table: Table) -> dict[str, Any]:
    """As `dualres report` shows it."""
    rows, reference = ([[cell._asdict() for cell in row] for row in rows] for rows in (table.rows, table.reference))
    return {**table._asdict(), "rows": rows, "reference": reference}


def _numbers(names: Sequence[str], texts: Sequence[str]) -> dict[str, float]:
    return {name: float(text.replace(",", "")) for name, text in zip(names, texts, strict=True)}


def _marked(text: str) -> str:
    """For Markdown, whose columns end at a bar; _ within a word means nothing to it."""
    return re.sub(r"([\\|*`<\[]|\b_|_\b|(?<!\w)_)", r"\\\1", text)


def _finite(data: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
