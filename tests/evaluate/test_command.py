"""`dualres evaluate` as a user meets it."""

import dataclasses
import fcntl
import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dualres.cli import main
from dualres.commands.arguments import parse_models
from dualres.config.schema import ConfigError
from dualres.evaluate import perplexity, zero_shot
from dualres.evaluate.batch_size import MAX_ROWS
from dualres.hub import open_model
from dualres.hub.open_model import TrainedModel
from dualres.util.atomic_files import LOCK
from dualres.util.errors import ModelError
from tests.evaluate.task_files import write_files, write_rows
from tests.evaluate.tiny import bpe_tokenizer, save_tiny, tiny_model
from tests.train.tiny import tiny_data

CONTEXT = 64
Evaluate = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Models by made-up names in place of folders: how each was asked for."""
    asked: list[dict[str, Any]] = []

    def load(folder: Path, **options: Any) -> TrainedModel:
        path = str(folder)
        asked.append({"path": path, **options})
        if path == "missing":
            raise ModelError("no model at missing: give a folder")
        tokens = bpe_tokenizer() if path == "bpe" else None
        made = tiny_model(tokens, context=CONTEXT, initializer_range=0.02 if path.endswith("small") else 0.3)
        return dataclasses.replace(made, identity=path)

    monkeypatch.setattr("dualres.hub.open_model.open_model", load)
    monkeypatch.setattr("dualres.hub.model_folder.local_folder", Path)
    return asked


@pytest.fixture
def evaluate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], loaded: list[dict[str, Any]]
) -> Evaluate:
    """In a folder with `texts` and `tasks`. -> exit code, standard output, standard error"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for name in ("ptb", "mine"):
        write_rows(tmp_path / "texts" / f"{name}.jsonl", [{"text": f"a text of {name}, number {i}"} for i in range(3)])
    write_files(tmp_path / "tasks")

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["evaluate", *arguments])
        return (code, *capsys.readouterr())

    return run


TASKS = ["--zero-shot", "piqa,boolq", "--tasks-from", "tasks"]
PERPLEXITY = ["--perplexity", "texts"]


def report(out: str = "evaluations") -> dict[str, Any]:
    return json.loads((Path(out) / "report.json").read_text())


def test_all_measures_of_two_models(evaluate: Evaluate, data: Path, tmp_path: Path):
    arguments = ["runs/small", "big=runs/large", "--validation", str(data), *PERPLEXITY, *TASKS]
    code, out, err = evaluate(*arguments)
    assert code == 0, err
    assert out.count("### ") == 3
    assert "| small | " in out
    assert "| big | " in out
    assert "wrote evaluations/report.md, evaluations/report.tex, evaluations/report.json" in err
    assert (tmp_path / "evaluations" / "report.md").read_text() == out
    first, second = report()["models"]
    assert first["identity"] == "runs/small"
    assert first["validation"]["loss"] < second["validation"]["loss"]
    assert len(first["sources"]) == len(first["tasks"]) == 2
    again = evaluate(*arguments)
    assert again[:2] == (0, out)
    assert again[2].count("(cached)") == 10


def test_what_is_kept_serves_more_models_and_measures(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch):
    assert evaluate("small", *PERPLEXITY)[0] == 0
    measured: list[tuple[str, str]] = []
    score = perplexity.score_source

    def watched(model: TrainedModel, source: Any, **options: Any) -> Any:
        measured.append((model.name, source.name))
        return score(model, source, **options)

    monkeypatch.setattr(perplexity, "score_source", watched)
    code, out, _ = evaluate("other=small", "large", *PERPLEXITY, "--zero-shot", "boolq", "--tasks-from", "tasks")
    assert code == 0
    assert measured == [("large", "mine"), ("large", "ptb")]
    assert "| other | **" in out


def test_the_stated_options_reach_the_measures(evaluate: Evaluate, loaded: list[dict[str, Any]], data: Path):
    code, out, err = evaluate(
        *("small", "--validation", str(data), "--validation-tokens", "64", *PERPLEXITY, *TASKS, "--limit", "1"),
        *("--first-token", "skipped", "--context", "32", "--batch", "2", "--checkpoint", "best", "--device", "cpu"),
        *("--dtype", "float32", "--out", "elsewhere", "--format", "json"),
    )
    assert code == 0, err
    assert loaded == [
        {"path": "small", "checkpoint": "best", "device": "cpu", "dtype": "float32", "architectures": "any"}
    ]
    found = json.loads(out)
    assert found == report("elsewhere")
    assert found["request"]["limit"] == 1
    [model] = found["models"]
    assert (model["context"], model["validation"]["context"], model["validation"]["tokens"]) == (32, 32, 64)
    assert {(source["first_token"], source["context"]) for source in model["sources"]} == {("skipped", 32)}
    assert {task["documents"] for task in model["tasks"]} == {1}


def test_the_batch_is_the_one_asked_for(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch):
    batches = []
    score = zero_shot.score_task

    def watched(*given: Any, **options: Any) -> Any:
        batches.append(options["batch"])
        return score(*given, **options)

    monkeypatch.setattr(zero_shot, "score_task", watched)
    assert evaluate("small", *TASKS, "--batch", "2")[0] == 0
    assert evaluate("large", *TASKS)[0] == 0
    assert batches[:2] == [2, 2]
    assert {batch.tokens for batch in batches[2:]} == {MAX_ROWS * CONTEXT}  # of a model that is small


def test_latex_is_printed_when_asked_for(evaluate: Evaluate):
    code, out, _ = evaluate("small", *PERPLEXITY, "--format", "latex")
    assert code == 0
    assert out == Path("evaluations/report.tex").read_text()
    assert out.startswith("\\begin{table}")


def test_all_eight_tasks_without_a_list(evaluate: Evaluate):
    code, out, err = evaluate("small", "--zero-shot", "--tasks-from", "tasks")
    assert code == 0, err
    assert "| Model | HellaSwag | PIQA | ARC-E | WinoGrande | BoolQ | OpenBookQA | SocialIQA | SciQ | Avg. |" in out
    assert report()["models"][0]["average"] is not None


def test_different_tokenizers_are_noticed(evaluate: Evaluate):
    _, out, _ = evaluate("small", "bpe", *PERPLEXITY)
    assert "different tokenizers" in out
    assert report()["same_tokenizer"] is False


def test_a_model_is_released_before_the_next_is_loaded(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch):
    alive: list[weakref.ref[Any]] = []
    load: Any = open_model.open_model

    def watched(path: str, **options: Any) -> TrainedModel:
        assert [reference() for reference in alive] == [None] * len(alive)
        made = load(path, **options)
        alive.append(weakref.ref(made.network))
        return made

    monkeypatch.setattr(open_model, "open_model", watched)
    gc.disable()  # so that the command itself must collect
    try:
        assert evaluate("small", "large", "third", *PERPLEXITY, *TASKS)[0] == 0
    finally:
        gc.enable()
    assert len(alive) == 3


def test_a_failed_task_leaves_the_rest_and_is_tried_again(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch):
    score = zero_shot.score_task

    def failing(model: TrainedModel, documents: Any, **options: Any) -> Any:
        if documents.task.name == "piqa":
            raise RuntimeError("a kernel\nbroke")
        return score(model, documents, **options)

    with monkeypatch.context() as patched:
        patched.setattr(zero_shot, "score_task", failing)
        code, out, err = evaluate("small", *TASKS)
    assert code == 1
    assert "dualres: small  zero-shot piqa failed: RuntimeError: a kernel broke\n" in err
    assert "Rerun the command to retry" in err
    assert re_row(out, "small")[1:3] == ["—", report_cell("boolq")]
    code, out, err = evaluate("small", *TASKS)
    assert code == 0
    assert err.count("(cached)") == 1
    assert "—" not in re_row(out, "small")


def re_row(out: str, name: str) -> list[str]:
    [line] = [line for line in out.splitlines() if line.startswith(f"| {name} |")]
    return line.strip("| ").split(" | ")


def report_cell(task: str) -> str:
    [found] = [found for found in report()["models"][0]["tasks"] if found["task"] == task]
    accuracy = found["accuracies"][found["metric"]]
    return f"{100 * accuracy['value']:.2f} ± {100 * accuracy['error']:.2f}"


def test_a_model_that_cannot_be_loaded_leaves_the_others(evaluate: Evaluate):
    code, out, err = evaluate("missing", "small", *PERPLEXITY)
    assert code == 1
    assert "dualres: missing  loading failed: no model at missing: give a folder\n" in err
    assert "| small | " in out
    assert "missing" not in out


def test_nothing_measured_is_wrong_input(evaluate: Evaluate):
    code, out, err = evaluate("missing", *PERPLEXITY)
    assert (code, out) == (2, "")
    assert err.endswith("dualres: missing  loading failed: no model at missing: give a folder\n")
    assert not Path("evaluations/report.md").exists()


def test_an_interruption_goes_on_where_it_stopped(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*given: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(zero_shot, "score_task", interrupted)
        assert evaluate("small", *PERPLEXITY, *TASKS)[0] == 130
    code, _, err = evaluate("small", *PERPLEXITY, *TASKS)
    assert code == 0
    assert err.count("(cached)") == 2


WRONG = [
    ([], "nothing to measure: use --validation"),
    ([*TASKS, "--limit", "0"], "--limit 0 is not positive"),
    ([*TASKS, "--context", "-1"], "--context -1 is not positive"),
    ([*TASKS, "--batch", "many"], "--batch many: use auto"),
    ([*TASKS, "--batch", "0"], "--batch 0: use auto"),
    ([*TASKS, "--device", "gpu"], "--device gpu is not a device: use auto, cpu, cuda or cuda:N"),
    ([*TASKS, "--device", "cuda:99"], "--device cuda:99: this machine has no GPU"),
    ([*PERPLEXITY, "--limit", "3"], "add --zero-shot"),
    (["--validation", "nowhere", "--validation-tokens", "0"], "--validation-tokens 0 is not positive"),
    ([*PERPLEXITY, "--validation-tokens", "3"], "--validation-tokens requires --validation"),
    (["--zero-shot", "mmlu"], "--zero-shot mmlu: unknown task"),
    (["--zero-shot", "--tasks-from", "nowhere"], "no task documents at nowhere"),
    (["--perplexity", "nowhere"], "no documents at nowhere"),
    (["--validation", "nowhere"], "nowhere"),
    (["second=small", "second=large", *PERPLEXITY], "two models are called second, small and large"),
    (["a/small", *PERPLEXITY], "two models are called small, small and a/small"),
    (["=large", *PERPLEXITY], "MODEL '=large' has no name"),
    (["name=", *PERPLEXITY], "MODEL 'name=' has no path"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_input_is_one_line_before_anything_is_loaded(
    arguments: list[str], message: str, evaluate: Evaluate, loaded: list[dict[str, Any]]
):
    code, out, err = evaluate("small", *arguments)
    assert (code, out, loaded) == (2, "", [])
    assert err.startswith("dualres: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_broken_file_of_a_task_is_refused_before_anything_is_loaded(
    evaluate: Evaluate, loaded: list[dict[str, Any]], tmp_path: Path
):
    with (tmp_path / "tasks" / "boolq_validation.jsonl").open("a") as file:
        file.write("{")
    code, _, err = evaluate("small", *TASKS)
    assert (code, loaded) == (2, [])
    assert "boolq_validation.jsonl, line 4 is not JSON" in err


def test_a_context_beyond_the_models_is_refused(evaluate: Evaluate):
    code, _, err = evaluate("small", *PERPLEXITY, "--context", "65")
    assert code == 2
    assert "--context 65 exceeds the context of small: use at most 64" in err


def test_a_folder_in_use_is_refused(evaluate: Evaluate, tmp_path: Path):
    (tmp_path / "evaluations").mkdir()
    with (tmp_path / "evaluations" / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, _, err = evaluate("small", *PERPLEXITY)
    assert code == 2
    assert "another process is writing to evaluations" in err


def test_names_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=3e-3").mkdir()
    models = parse_models(["runs/a", "b=runs/c/", "owner/d", "lr=3e-3", "my  e=x=y"])
    assert models == {"a": "runs/a", "b": "runs/c/", "d": "owner/d", "lr=3e-3": "lr=3e-3", "my e": "x=y"}
    assert list(parse_models(["."])) == [tmp_path.name]
    assert list(parse_models(["lr=3e-3/"])) == ["lr=3e-3"]
    with pytest.raises(ConfigError, match="NAME=PATH"):
        parse_models(["a", "x/a"])


def test_a_saved_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Loaded as it will be, from a folder that `save_pretrained` wrote."""
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "saved", context=64)
    write_rows(tmp_path / "texts.jsonl", [{"text": "a text"}, {"text": "another", "source": "other"}])
    write_files(tmp_path / "tasks")
    arguments = ["evaluate", "saved", "--perplexity", "texts.jsonl", *TASKS]
    assert main(arguments) == 0, capsys.readouterr().err
    assert [source["name"] for source in report()["models"][0]["sources"]] == ["texts", "other"]
    capsys.readouterr()
    assert main(arguments) == 0
    assert capsys.readouterr().err.count("(cached)") == 4
    save_tiny(tmp_path / "saved", context=CONTEXT, initializer_range=0.1)
    assert main(arguments) == 0
    assert "(cached)" not in capsys.readouterr().err
