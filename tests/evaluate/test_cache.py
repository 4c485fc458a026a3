"""Cached results: keyed by all that determines them, measured again when damaged, complete after an interruption."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dualres.evaluate import evaluation, perplexity, zero_shot
from dualres.evaluate.documents import find_sources
from dualres.evaluate.evaluation import EvaluationRequest, Measurement, ModelResult, tokenizer_digest
from dualres.evaluate.tasks import parse_tasks, task_documents
from dualres.evaluate.validation import ValidationScore
from dualres.util.progress import Progress
from tests.evaluate.task_files import FILES, write_files, write_rows
from tests.evaluate.tiny import InMemory, bpe_tokenizer, byte_tokenizer, tiny_model
from tests.train.tiny import tiny_data

TASKS = "piqa,boolq"


class MiddleError(Exception):
    """Something that goes wrong in the middle."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "documents"
    folder.mkdir()
    for name in ("ptb", "mine"):
        write_rows(folder / f"{name}.jsonl", [{"text": f"a text of {name}, number {i}"} for i in range(3)])
    return folder


@pytest.fixture
def asked(data: Path, documents: Path, tmp_path: Path) -> Callable[..., EvaluationRequest]:
    """All measures; read anew at each call, as a command does."""
    tasks = write_files(tmp_path / "tasks")

    def make(**changes: Any) -> EvaluationRequest:
        everything = {
            "validation": data,
            "validation_tokens": 64,
            "documents": "documents",
            "sources": tuple(find_sources(documents)),
            "tasks": tuple(task_documents(parse_tasks(TASKS), str(tasks))),
        }
        return EvaluationRequest(**{**everything, **changes})

    return make


@pytest.fixture
def model() -> InMemory:
    return tiny_model(context=64)


def run(
    model: InMemory, asked: EvaluationRequest, out: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[ModelResult, list[str]]:
    """-> the result, and the measurements that were not cached"""
    measured: list[str] = []
    make = evaluation.measurements

    def watched(*given: Any) -> list[Measurement]:
        def recording(measurement: Measurement) -> Callable[[], Any]:
            def run() -> Any:
                measured.append(measurement.title)
                return measurement.run()

            return run

        return [found._replace(run=recording(found)) for found in make(*given)]

    with monkeypatch.context() as patched:
        patched.setattr(evaluation, "measurements", watched)
        result, failures = evaluation.measure(model, asked, out, Progress())
    assert failures == []
    return result, measured


ALL = ["validation", "perplexity mine", "perplexity ptb", "zero-shot piqa", "zero-shot boolq"]


def test_nothing_is_measured_twice(
    model: InMemory, asked: Callable[..., EvaluationRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, measured = run(model, asked(), tmp_path / "out", monkeypatch)
    assert measured == ALL
    again, measured = run(model, asked(rows=1), tmp_path / "out", monkeypatch)
    assert measured == []
    assert again == first
    assert len(first.sources) == len(first.tasks) == 2
    assert first.validation is not None
    assert first.validation.tokens == 64


def test_everything_that_determines_a_number_is_in_its_key(
    model: InMemory,
    asked: Callable[..., EvaluationRequest],
    documents: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    out = tmp_path / "out"
    run(model, asked(), out, monkeypatch)

    def measured(model: InMemory = model, **changes: Any) -> list[str]:
        return run(model, asked(**changes), out, monkeypatch)[1]

    assert measured(dataclasses.replace(model, identity="another")) == ALL
    assert measured(dataclasses.replace(model, context=63)) == ALL
    assert measured(dataclasses.replace(model, prefix=0)) == ALL
    assert measured(dataclasses.replace(model, name="renamed")) == []
    assert measured(first_token="skipped") == ALL[1:3]
    assert measured(limit=1) == ALL[3:]
    assert measured(validation_tokens=None) == ALL[:1]
    write_rows(documents / "mine.jsonl", [{"text": "another text"}])
    assert measured() == ["perplexity mine"]
    write_rows(tmp_path / "tasks" / "boolq_validation.jsonl", FILES["boolq_validation.jsonl"][:2])
    assert measured() == ["zero-shot boolq"]
    (tmp_path / "tasks" / "piqa_validation.jsonl").rename(tmp_path / "tasks" / "piqa_test.jsonl")
    assert measured() == ["zero-shot piqa"]
    monkeypatch.setattr(zero_shot, "harness_version", lambda: "0.5")
    assert measured() == ALL[3:]
    monkeypatch.setattr(evaluation, "PROTOCOL", 2)
    assert measured() == ALL


def test_an_interruption_loses_only_the_running_measurement(
    model: InMemory, asked: Callable[..., EvaluationRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patched:

        def interrupted(*given: Any, **options: Any) -> None:
            raise KeyboardInterrupt

        patched.setattr(zero_shot, "score_task", interrupted)
        with pytest.raises(KeyboardInterrupt):
            evaluation.measure(model, asked(), tmp_path / "out", Progress())
    assert run(model, asked(), tmp_path / "out", monkeypatch)[1] == ALL[3:]


def test_a_failure_does_not_stop_the_other_measurements(
    model: InMemory,
    asked: Callable[..., EvaluationRequest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    score = perplexity.score_source

    def failing(model: InMemory, source: Any, **options: Any) -> Any:
        if source.name == "mine":
            raise MiddleError("went\nwrong")
        return score(model, source, **options)

    with monkeypatch.context() as patched:
        patched.setattr(perplexity, "score_source", failing)
        result, failures = evaluation.measure(model, asked(), tmp_path / "out", Progress())
    assert [failure.what for failure in failures] == ["tiny  perplexity mine"]
    assert "dualres: tiny  perplexity mine failed: MiddleError: went wrong\n" in capsys.readouterr().err
    assert [source.name for source in result.sources] == ["ptb"]
    assert len(result.tasks) == 2
    assert run(model, asked(), tmp_path / "out", monkeypatch)[1] == ["perplexity mine"]


def test_a_full_disk_stops_the_evaluation(
    model: InMemory, asked: Callable[..., EvaluationRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*given: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(perplexity, "score_source", full)
    with pytest.raises(OSError, match="No space"):
        evaluation.measure(model, asked(), tmp_path / "out", Progress())


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def changed_digit(path: Path) -> None:
    found = json.loads(path.read_text())
    found["result"]["nats"] += 1e-9
    path.write_text(json.dumps(found))


def of_another(path: Path) -> None:
    [other] = path.parent.glob("perplexity-ptb-*")
    path.write_bytes(other.read_bytes())


def not_an_object(path: Path) -> None:
    path.write_text("[]")


def without_a_field(path: Path) -> None:
    found = json.loads(path.read_text())
    del found["result"]["nats"]
    path.write_text(json.dumps({**found, "checksum": evaluation._checksum(found["result"])}))


@pytest.mark.parametrize("damage", [cut_off, changed_digit, of_another, not_an_object, without_a_field])
def test_a_damaged_file_is_measured_again_with_a_note(
    damage: Callable[[Path], None],
    model: InMemory,
    asked: Callable[..., EvaluationRequest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    only = {"validation": None, "tasks": ()}
    first, _ = run(model, asked(**only), tmp_path / "out", monkeypatch)
    [path] = (tmp_path / "out").rglob("perplexity-mine-*")
    damage(path)
    capsys.readouterr()
    again, measured = run(model, asked(**only), tmp_path / "out", monkeypatch)
    assert measured == ["perplexity mine"]
    assert f"{path} is damaged" in capsys.readouterr().err
    assert again == first
    assert run(model, asked(**only), tmp_path / "out", monkeypatch)[1] == []


def test_names_of_files_are_plain(tmp_path: Path):
    measurement = Measurement("perplexity ../../é/x" + "y" * 300, {}, int, lambda data: ValidationScore(**data))
    path = evaluation.cache_path(tmp_path, measurement)
    assert path.parent == tmp_path / evaluation.CACHE
    assert path.name.startswith("perplexity---------xyyy")
    assert len(path.name) < 110
    score = ValidationScore(2.5, 64, 32, "abc")
    evaluation.write_cached(tmp_path, measurement, score)
    assert evaluation.read_cached(tmp_path, measurement, print) == score


def test_a_tokenizer_is_known_by_the_tokens_it_makes():
    assert tokenizer_digest(tiny_model()) == tokenizer_digest(tiny_model())
    assert tokenizer_digest(tiny_model()) != tokenizer_digest(tiny_model(bpe_tokenizer()))
    padded = byte_tokenizer()
    padded("a", padding="max_length", max_length=5, truncation=True)  # leaves its mark in the tokenizer's description
    assert tokenizer_digest(tiny_model(padded)) == tokenizer_digest(tiny_model())
