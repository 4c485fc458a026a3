"""Tables: what is bold, the notes, the paper's rows apart from ours, and the three formats."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from dualres.config import paper
from dualres.evaluate import formats
from dualres.evaluate.documents import PALOMA, DocumentSource
from dualres.evaluate.evaluation import EvaluationRequest, ModelResult
from dualres.evaluate.perplexity import SourceScore
from dualres.evaluate.tables import ResultTable, TableCell, by_source, fit, tables, zero_shot
from dualres.evaluate.tasks import TASKS, TaskDocuments
from dualres.evaluate.validation import ValidationScore
from dualres.evaluate.zero_shot import Accuracy, TaskScore

BYTES, TOKENS = 4000, 1000


def source_score(name: str, token_ppl: float, tokens: int = TOKENS) -> SourceScore:
    return SourceScore(name, 10, tokens, BYTES, tokens * math.log(token_ppl), "scored", 64)


def task_score(name: str, value: float, **changes: Any) -> TaskScore:
    task = next(task for task in TASKS if task.name == name)
    accuracies = {metric: Accuracy(value, 0.0123) for metric in {"acc", task.metric}}
    given = TaskScore(name, task.metric, accuracies, 500, 0, "0.4.13", "1.0")
    return given._replace(**changes)


def model(name: str, loss: float | None = None, ppl: dict[str, float] | None = None, **more: Any) -> ModelResult:
    """`more`: accuracies by task, a tokenizer, a context."""
    tasks = tuple(task_score(task.name, more[task.name]) for task in TASKS if task.name in more)
    return ModelResult(
        name,
        f"identity of {name}",
        more.get("tokenizer", "one"),
        more.get("context", 64),
        None if loss is None else ValidationScore(loss, 6400, more.get("context", 64), "content"),
        tuple(source_score(source, value) for source, value in (ppl or {}).items()),
        tasks,
    )


def asked(sources: list[str] | None = None, tasks: str = "", **changes: Any) -> EvaluationRequest:
    found = tuple(DocumentSource(name, (), False, 10, BYTES, name) for name in sources or ())
    documents = tuple(TaskDocuments(task, task.split, task.hub, "", None) for task in TASKS if task.name in tasks)
    return EvaluationRequest(**{"documents": "texts", "sources": found, "tasks": documents, **changes})


def column(table: ResultTable, name: str) -> list[TableCell]:
    return [row[table.header.index(name)] for row in table.rows]


def bold(table: ResultTable, name: str) -> list[bool]:
    return [cell.bold for cell in column(table, name)]


def notes(table: ResultTable) -> str:
    return "\n".join(table.notes)


DATA = Path("data/fineweb")


def test_fit_has_the_papers_columns_and_the_means():
    models = [model("a", 2.7164, {"x": 20.0, "y": 80.0}), model("b", 2.7041, {"x": 30.0, "y": 30.0})]
    table = fit(models, asked(["x", "y"], validation=DATA))
    assert table.header == (
        *("Model", "Val. loss", "Token PPL", "Byte PPL", "BPB"),
        *("Token PPL, macro", "Byte PPL, macro", "BPB, macro"),
    )
    # Pooled: exp of the mean log, 40; the macro mean is 50. Four bytes are a token.
    a = [cell.text for cell in table.rows[0]]
    byte = 40 ** (1 / 4)
    macro = (20**0.25 + 80**0.25) / 2
    assert a == [
        "a",
        "2.716",
        "40.000",
        f"{byte:.3f}",
        f"{math.log2(byte):.3f}",
        "50.000",
        f"{macro:.3f}",
        f"{math.log2(40) / 4:.3f}",
    ]
    assert bold(table, "Val. loss") == bold(table, "Token PPL") == bold(table, "Token PPL, macro") == [False, True]


def test_only_what_was_asked_for_has_a_column():
    assert fit([model("a", 2.7)], asked(validation=DATA)).header == ("Model", "Val. loss")
    assert "Val. loss" not in fit([model("a", ppl={"x": 9.0})], asked(["x"])).header
    everything = asked(["x"], "boolq", validation=DATA)
    assert [table.name for table in tables([model("a", 1.0, {"x": 2.0}, boolq=0.5)], everything)] == [
        *("fit", "sources", "zero-shot")
    ]
    assert [table.name for table in tables([model("a", 1.0)], asked(validation=DATA))] == ["fit"]


@pytest.mark.parametrize(
    ("losses", "bolds"),
    [
        ((2.5, 2.6, 2.7), (True, False, False)),
        ((2.6001, 2.6004, 2.7), (True, True, False)),  # the same printed digits
        ((2.6004, 2.6006, 2.7), (True, False, False)),
        ((10.5, 9.5, 11.0), (False, True, False)),  # numbers, not texts
        ((None, 2.6, 2.5), (False, False, True)),
        ((None, 2.6, None), (False, False, False)),  # the best of one is none
    ],
)
def test_bold_is_the_best_by_what_is_printed(losses: tuple[float | None, ...], bolds: tuple[bool, ...]):
    models = [model(name, loss) for name, loss in zip("abc", losses, strict=True)]
    table = fit(models, asked(validation=DATA))
    assert tuple(bold(table, "Val. loss")) == bolds
    assert [cell.text == "—" for cell in column(table, "Val. loss")] == [loss is None for loss in losses]


def test_a_single_model_is_not_bold():
    assert bold(fit([model("a", 9.9)], asked(validation=DATA)), "Val. loss") == [False]
    assert bold(zero_shot([model("a", boolq=0.5)], asked(tasks="boolq")), "BoolQ") == [False]


def test_the_papers_rows_are_apart_and_never_bold():
    models = [model("a", 9.0, {"ptb": 900.0}, boolq=0.1), model("b", 9.1, {"ptb": 901.0}, boolq=0.2)]
    made = tables(models, asked(["ptb"], "boolq", validation=DATA))
    for table in made:
        assert not any(cell.bold for row in table.reference for cell in row)
    assert bold(made[0], "Val. loss") == [True, False]
    assert [[cell.text for cell in row[:5]] for row in made[0].reference] == [
        ["Baseline", "2.716", "21.575", "2.040", "1.029"],
        ["AttnRes", "2.704", "20.707", "2.021", "1.015"],
        ["DAR", "2.684", "20.264", "2.011", "1.008"],
    ]
    assert [cell.text for cell in made[0].reference[0][5:]] == ["—"] * 3
    assert [(cell.text, cell.bold) for cell in made[1].rows[0]] == [
        *(("PTB", False), ("900.00", True), ("901.00", False)),
        *(("53.38", False), ("50.92", False), ("47.78", False)),
    ]
    assert made[1].header[3:] == ("paper's Baseline", "paper's AttnRes", "paper's DAR")
    assert "not reproduced here" in notes(made[1])


def test_different_tokenizers_are_compared_by_bytes_only():
    models = [model("a", 2.5, {"x": 20.0}), model("b", 2.6, {"x": 30.0}, tokenizer="two")]
    table = fit(models, asked(["x"], validation=DATA))
    compared = {name for name in table.header[1:] if any(bold(table, name))}
    assert compared == {"Byte PPL", "BPB", "Byte PPL, macro", "BPB, macro"}
    by = by_source(models, asked(["x"]))
    assert not any(cell.bold for row in by.rows for cell in row)
    for made in (table, by):
        assert "different tokenizers" in notes(made)
    same = [row._replace(tokenizer="two") for row in models]
    assert "different tokenizers" not in notes(fit(same, asked(["x"])))
    assert any(bold(fit(same, asked(["x"])), "Token PPL"))


@pytest.mark.parametrize(
    ("sources", "paloma"),
    [([*PALOMA], True), ([*PALOMA][:15], False), ([*PALOMA, "mine"], False), (["mine"], False)],
    ids=["sixteen", "fifteen", "seventeen", "own"],
)
def test_only_all_sixteen_sources_are_called_paloma(sources: list[str], paloma: bool):
    models = [model("a", ppl=dict.fromkeys(sources, 40.0))]
    for table in tables(models, asked(sources)):
        assert ("not Paloma" not in table.title) == paloma
        assert ("the sixteen Paloma sources" in table.title) == paloma
        for text in (formats.markdown(table), formats.latex(table)):
            assert ("not Paloma" not in text) == paloma
    assert formats.as_data(models, asked(sources))["request"]["paloma"] == paloma


def test_sources_stand_in_the_papers_order_under_its_names():
    names = ["zebra", *reversed(PALOMA), "ant"]
    table = by_source([model("a", ppl=dict.fromkeys(names, 12345.678))], asked(names))
    groups = [row[0].text for row in table.rows]
    assert groups == [*(row.group for row in paper.PALOMA), "zebra", "ant"]
    assert [row[1].text for row in table.rows] == ["12,345.68"] * 18
    assert [tuple(cell.text for cell in row[2:]) for row in table.rows] == [
        *(row.perplexity for row in paper.PALOMA),
        *[("—",) * 3] * 2,
    ]
    assert by_source([model("a", ppl={"ant": 1.0})], asked(["ant"])).header == ("Source", "a")


def test_a_failed_source_leaves_no_pooled_number():
    models = [model("a", ppl={"x": 20.0, "y": 80.0}), model("b", ppl={"x": 30.0})]
    table = fit(models, asked(["x", "y"]))
    assert [cell.text for cell in table.rows[1]] == ["b", *["—"] * 6]
    assert [cell.text for cell in by_source(models, asked(["x", "y"])).rows[1]] == ["y", "80.00", "—"]
    data = formats.as_data(models, asked(["x", "y"]))["models"][1]
    assert (data["pooled"], data["macro"]) == (None, None)
    assert len(data["sources"]) == 1


def eight(start: float) -> dict[str, Any]:
    return {task.name: start + number / 100 for number, task in enumerate(TASKS)}


def test_zero_shot_in_percent_with_errors_and_the_average():
    models = [model("a", **eight(0.5)), model("b", **{**eight(0.5), "boolq": 0.9})]
    table = zero_shot(models, asked(tasks=" ".join(eight(0))))
    assert table.header == ("Model", *paper.ZERO_SHOT_COLUMNS, "SocialIQA acc")
    assert table.rows[0][1] == TableCell("50.00", "1.23", True)  # b has the same
    assert column(table, "BoolQ") == [TableCell("54.00", "1.23"), TableCell("90.00", "1.23", True)]
    assert column(table, "Avg.") == [TableCell("53.50"), TableCell("58.00", "", True)]
    assert [row[9].text for row in table.reference] == ["54.53", "55.20", "55.63"]
    assert [row[10].text for row in table.reference] == ["—"] * 3


def test_both_metrics_of_social_iqa():
    given = model("a", social_iqa=0.5)
    accuracies = {"acc": Accuracy(0.25, 0.01), "acc_norm": Accuracy(0.5, 0.02)}
    given = given._replace(tasks=(given.tasks[0]._replace(accuracies=accuracies),))
    table = zero_shot([given], asked(tasks="social_iqa"))
    assert [cell.text for cell in table.rows[0]] == ["a", "50.00", "50.00", "25.00"]
    assert "acc_norm is added" in notes(table)


def test_an_average_of_fewer_tasks_says_so():
    table = zero_shot([model("a", boolq=0.5, sciq=0.7), model("b", boolq=0.5)], asked(tasks="boolq sciq"))
    assert table.header == ("Model", "BoolQ", "SciQ", "Avg. of 2")
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["a", "50.00", "70.00", "60.00"],
        ["b", "50.00", "—", "—"],
    ]
    assert [row[3].text for row in table.reference] == ["—"] * 3  # the paper's is of eight


def test_beneath_zero_shot_stands_how_it_was_measured():
    models = [model("a", boolq=0.5, arc_easy=0.7), model("b", boolq=0.5, arc_easy=0.7, context=32)]
    stock = asked(tasks="boolq arc_easy")
    text = notes(zero_shot(models, stock))
    for part in (
        *("lm-evaluation-harness 0.4.13", "64 tokens (a), 32 tokens (b)", "acc_norm of ARC-E", "acc of BoolQ"),
        *("test of allenai/ai2_arc ARC-Easy: ARC-E 500", "validation of aps/super_glue boolq: BoolQ 500"),
    ):
        assert part in text
    assert "trial" not in text
    assert "another split" not in text
    arc, boolq = stock.tasks
    other = arc._replace(split="validation", origin="arc_easy_validation.jsonl", note="oddities")
    table = zero_shot(models, EvaluationRequest(tasks=(other, boolq), limit=7))
    assert "the first 7 documents" in notes(table)
    assert "first 7 documents" in table.title
    assert "ARC-E 500 (oddities)" in notes(table)
    assert "default split of ARC-E is test" in notes(table)


def test_cut_prompts_are_told_by_model():
    models = [model("a", boolq=0.5), model("b", boolq=0.5)]
    assert "truncated" not in notes(zero_shot(models, asked(tasks="boolq")))
    models[0] = models[0]._replace(tasks=(models[0].tasks[0]._replace(cut=1234),))
    assert "fit into the context: BoolQ 1,234 (a), 0 (b)." in notes(zero_shot(models, asked(tasks="boolq")))


def test_beneath_fit_stands_how_it_was_measured():
    models = [model("a", 2.5, {"x": 20.0, "y": 3.0}), model("b", 2.6, {"x": 30.0, "y": 4.0})]
    text = notes(fit(models, asked(["x", "y"], validation=DATA)))
    for part in (
        "6,400 tokens of fineweb",
        "windows of 64 tokens",
        "20 documents of 8,000 bytes",
        "every token scored",
    ):
        assert part in text
    assert "windows of 64 tokens (a), 32 tokens (b)" in notes(
        fit([models[0], models[1]._replace(context=32)], asked(["x", "y"]))
    )
    assert "first token of each window skipped" in notes(fit(models, asked(["x", "y"], first_token="skipped")))


ODD = r"a|b_1 & 50% #3 {x} \n ~^ <b> _e_ *s*"


def test_odd_names_are_escaped():
    table = fit([model(ODD, 2.5), model("b", 2.6)], asked(validation=DATA))
    [line] = [line for line in formats.markdown(table).splitlines() if "2.500" in line]
    assert line == r"| a\|b_1 & 50% #3 {x} \\n ~^ \<b> \_e\_ \*s\* | **2.500** |"
    [line] = [line for line in formats.latex(table).splitlines() if "2.500" in line]
    assert line == (
        r"a|b\_1 \& 50\% \#3 \{x\} \textbackslash{}n \textasciitilde{}\textasciicircum{} \textless{}b\textgreater{} "
        r"\_e\_ *s* & \textbf{2.500} \\"
    )


def everything() -> tuple[list[ModelResult], EvaluationRequest]:
    models = [model("a_1", 2.5, {"ptb": 20.0}, **eight(0.5)), model("b", 2.6, {"ptb": 1e4}, **eight(0.4))]
    return models, asked(["ptb"], " ".join(eight(0)), validation=DATA)


def test_markdown_has_as_many_cells_in_every_row():
    for table in tables(*everything()):
        lines = [line for line in formats.markdown(table).splitlines() if line.startswith("|")]
        assert len(lines) == 2 + len(table.rows) + (1 + len(table.reference) if table.reference else 0)
        assert {line.count(" | ") for line in lines} == {len(table.header) - 1}
        assert ("| *the paper's 1B, not reproduced here* |" in "\n".join(lines)) == bool(table.reference)
    [row] = [line for line in formats.markdown(tables(*everything())[2]).splitlines() if line.startswith("| a_1 |")]
    assert row.startswith("| a_1 | **50.00** ± 1.23 | **51.00** ± 1.23 |")


def test_latex_is_balanced_and_has_as_many_cells_in_every_row():
    for table in tables(*everything()):
        text = formats.latex(table)
        for pair in ("table", "tabular", "minipage"):
            assert text.count(f"\\begin{{{pair}}}") == text.count(f"\\end{{{pair}}}") == 1
        assert len(re.findall(r"(?<!\\)\{", text)) == len(re.findall(r"(?<!\\)\}", text))
        assert not re.search(r"[^\x00-\x7f]", text)  # needs no special setting of LaTeX
        assert not re.search(r"(?<!\\)[_%#]", text)
        rows = [line for line in text.splitlines() if line.endswith("\\\\") and "multicolumn" not in line]
        assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {len(table.header) - 1}
        assert [rule in text for rule in ("\\toprule", "\\midrule", "\\bottomrule")] == [True] * 3
        assert ("not reproduced here}} \\\\" in text) == bool(table.reference)


def test_json_has_every_number():
    data = json.loads(json.dumps(formats.as_data(*everything()), allow_nan=False))
    first, second = data["models"]
    assert first["validation"]["loss"] == 2.5
    assert [source["group"] for source in first["sources"]] == ["PTB"]
    assert {"token_ppl", "byte_ppl", "bits_per_byte"} <= first["sources"][0].keys()
    assert second["pooled"]["token_ppl"] == pytest.approx(1e4, rel=1e-12)
    assert first["macro"]["sources"] == 1
    assert first["average"] == pytest.approx(0.535, rel=1e-12)
    assert first["tasks"][0]["accuracies"]["acc_norm"] == {"value": 0.5, "error": 0.0123}
    assert {"cut", "harness", "version", "documents"} <= first["tasks"][0].keys()
    assert {"split", "origin", "note"} <= data["request"]["tasks"][0].keys()
    assert data["same_tokenizer"] is True
    assert data["paper"]["paloma"][4]["Baseline"] == 41241.97
    assert data["paper"]["zero_shot"][2]["Avg."] == 55.63
    assert "not reproduced" in data["paper"]["about"]


def test_json_has_the_tables_as_they_are_printed():
    models, given = everything()
    data = json.loads(json.dumps(formats.as_data(models, given), allow_nan=False))
    for written, table in zip(data["tables"], tables(models, given), strict=True):
        assert {name: written[name] for name in ("name", "title")} == {"name": table.name, "title": table.title}
        assert (tuple(written["header"]), tuple(written["notes"])) == (table.header, table.notes)
        for rows, kept in ((written["rows"], table.rows), (written["reference"], table.reference)):
            assert tuple(tuple(TableCell(**cell) for cell in row) for row in rows) == kept


def test_a_perplexity_beyond_all_bounds():
    endless = SourceScore("x", 1, 10, 40, 1e5, "scored", 64)
    models = [model("a")._replace(sources=(endless,)), model("b", ppl={"x": 20.0})]
    table = fit(models, asked(["x"]))
    assert [cell.text for cell in column(table, "Token PPL")] == ["inf", "20.000"]
    assert bold(table, "Token PPL") == [False, True]
    assert (
        json.loads(json.dumps(formats.as_data(models, asked(["x"])), allow_nan=False))["models"][0]["pooled"][
            "token_ppl"
        ]
        is None
    )


def test_the_papers_numbers_are_consistent():
    """Averages as printed, the methods that the text says are best, and the names that Paloma's files have."""
    for row in paper.ZERO_SHOT:
        *scores, mean = map(float, row.scores)
        assert len(scores) == 8
        assert mean == pytest.approx(sum(scores) / 8, abs=0.00501)
    best = [max(paper.ZERO_SHOT, key=lambda row: float(row.scores[i])).name for i in range(8)]
    assert best == ["DAR", "AttnRes", "AttnRes", "DAR", "DAR", "DAR", "DAR", "AttnRes"]
    assert [row.group for row in paper.PALOMA] == [*PALOMA.values()]
    values = [[float(text.replace(",", "")) for text in row.perplexity] for row in paper.PALOMA]
    assert [row.group for row, ppl in zip(paper.PALOMA, values, strict=True) if min(ppl) != ppl[2]] == ["4chan"]
    for row in paper.FIT:
        _, token, byte, bits = map(float, row.scores)
        assert bits == pytest.approx(math.log2(byte), abs=0.001)
        assert token < min(min(ppl) for ppl in values)  # as it says beneath our table
    assert paper.ZERO_SHOT_COLUMNS[:8] == tuple(task.title for task in TASKS)


def test_a_newline_in_a_name_does_not_end_a_note():
    request, other = asked(validation=Path("data")), model("c", loss=2.0)._replace(context=7)
    split, whole = (fit([model(name, loss=3.0), other], request) for name in ("a\nb", "a b"))
    assert split.notes == whole.notes
