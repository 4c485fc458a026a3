"""A real suite of tiny runs: table, picture, presets, resumption."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dualres.cli import main
from dualres.config.paper import KV_ABLATION, SIZE_SWEEP
from dualres.report import comparison
from dualres.report.comparison import ComparisonRow
from dualres.report.runs import Run
from dualres.report.suite import Suite, SuiteRun, all_runs, finished_runs, group_by_rate, run_all
from dualres.train.run_folder import SUMMARY
from dualres.util.progress import Progress
from tests.train.tiny import ROOT, metrics, overrides, tiny_config, tiny_data, train_tiny

SHORT: dict[str, Any] = {"train__tokens": 8 * 4 * 32, "train__validate_every": 4}
BOTH = ["suite", "nano", "--residuals", "standard,dar-block", "--seeds", "0,1"]


def arguments(data: Path, out: Path, *more: str, **changes: Any) -> list[str]:
    sets = [part for override in overrides(**{**SHORT, **changes}) for part in ("--set", override)]
    return ["--data", str(data), "--out", str(out), "--device", "cpu", *sets, *more]


def train(data: Path, folder: Path, residual: str = "standard", **changes: Any) -> None:
    """A run as the suite starts it, without the time that a process takes to start."""
    train_tiny(tiny_config(residual, **{**SHORT, **changes}), data, folder)


@pytest.fixture(scope="module")
def suite(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with two seeds; the suite itself runs the last."""
    out = tmp_path_factory.mktemp("suites") / "nano"
    for residual, seed in (("standard", 0), ("standard", 1), ("dar-block", 0)):
        train(data, out / f"nano-{residual}-seed{seed}", residual, train__seed=seed)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")  # as in this process: speeds compare at equal threads
        assert main([*BOTH, *arguments(data, out)]) == 0
    return out


def test_the_table(suite: Path, data: Path, capsys: pytest.CaptureFixture[str]):
    before = {path: path.stat().st_mtime_ns for path in suite.glob(f"*/{SUMMARY}")}
    assert main([*BOTH, *arguments(data, suite)]) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before  # nothing was run again
    shown = capsys.readouterr()
    assert shown.err.count("already finished") == 4
    losses = {
        (method, seed): json.loads((suite / f"nano-{method}-seed{seed}" / SUMMARY).read_text())["validation_loss"]
        for method in ("standard", "dar-block")
        for seed in (0, 1)
    }
    mean = (losses["dar-block", 0] + losses["dar-block", 1]) / 2
    differences = [losses["dar-block", seed] - losses["standard", seed] for seed in (0, 1)]
    [line] = [line for line in shown.out.splitlines() if " dar-block " in line]
    half = 12.706 * abs(differences[0] - differences[1]) / 2  # t · s / √2, s = |a − b| / √2
    assert f"{mean:.4f} ± " in line
    assert f"{sum(differences) / 2:+.4f} ± {half:.4f}" in line
    assert line.count("×") == 2  # speed and memory
    assert (suite / "table.txt").read_text().splitlines()[0] == shown.out.splitlines()[0]
    written = json.loads((suite / "suite.json").read_text())
    assert len(written["runs"]) == 4
    assert written["rows"][1]["difference"]["mean"] == pytest.approx(sum(differences) / 2)


def test_the_picture(suite: Path):
    assert (suite / "curves.png").read_bytes().startswith(b"\x89PNG")
    drawn = (suite / "curves.svg").read_text()
    assert "<svg" in drawn
    assert drawn.count("<path") > 4


def test_without_matplotlib_there_is_a_table(
    suite: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    copied = Path(shutil.copytree(suite, tmp_path / "nano", ignore=shutil.ignore_patterns("curves.*")))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*BOTH, *arguments(data, copied)]) == 0
    out, err = capsys.readouterr()
    assert " dar-block " in out
    assert "drawing the loss curves needs the package matplotlib (extra plots): pip install -e '.[plots]'" in err
    assert "curves" not in out
    assert not list(copied.glob("curves.*"))


@pytest.mark.parametrize(("verbosity", "option"), [(-1, {"--quiet"}), (0, set()), (1, {"--verbose"})])
def test_runs_say_as_much_as_the_suite(
    verbosity: int, option: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    commands = []

    class Failing:
        def __init__(self, command: list[str]):
            commands.append(command)

        def wait(self) -> int:
            return 1

    monkeypatch.setattr("subprocess.Popen", Failing)
    assert len(run_all(Suite(all_runs([("nano", "standard")], [0]), tmp_path, tmp_path), Progress(verbosity))) == 1
    assert {*commands[0]} & {"--quiet", "--verbose"} == option


def test_methods_see_the_same_data_and_start(suite: Path):
    """Zero queries and equal branch weights: the first losses are nearly those of `standard`, and seeds differ."""
    first = {
        path.parent.name: json.loads(metrics(path.parent).splitlines()[0])["loss"]
        for path in suite.glob(f"*/{SUMMARY}")
    }
    assert abs(first["nano-standard-seed0"] - first["nano-dar-block-seed0"]) < 0.05
    assert first["nano-standard-seed0"] != first["nano-standard-seed1"]


def test_another_budget_in_the_same_folder_is_refused(suite: Path, data: Path, capsys: pytest.CaptureFixture[str]):
    changed = arguments(data, suite, train__learning_rate=0.001)
    assert main(["suite", "nano", "--residuals", "standard", "--seeds", "0", *changed]) == 1
    assert "train.learning_rate 0.003 → 0.001" in capsys.readouterr().err


def test_other_data_in_the_same_folder_are_refused(suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    other = tiny_data(tmp_path, topics=50)
    given = arguments(other, suite)
    assert main(["suite", "nano", "--residuals", "standard,attnres-block", "--seeds", "0", *given]) == 1
    assert "was trained on different data" in capsys.readouterr().err
    assert not (suite / "nano-attnres-block-seed0").exists()


@pytest.mark.parametrize(
    ("given", "changes", "code", "says"),
    [
        (["--seeds", "0,0"], {}, 2, "--seeds 0,0 has a value twice: write 0,1,2"),
        (["--seeds", "a"], {}, 2, "--seeds a is not a list of numbers: write 0,1,2"),
        (["--learning-rates", "0.001,1e-3"], {}, 2, "has a value twice: write 1e-3,3e-3"),
        (["--residuals", ","], {}, 2, "--residuals , is empty"),
        (["--residuals", "standard,standard"], {}, 2, "has a value twice"),
        (["--residuals", "standard,darblock"], {}, 2, "darblock"),
        (["--processes", "0"], {}, 2, "--processes 0 is not positive"),
        (["--processes", "3"], {}, 2, "train.global_batch=4 must be at least"),
        (["--residuals", "dar-block,standard"], {"residual__share_parameters": "false"}, 2, "share_parameters"),
        ([], {"model__vocab_size": 100}, 1, "the tokenizer has 257 tokens"),
        (["--data", "nowhere"], {}, 2, "nowhere has no index.json"),
    ],
)
def test_what_is_refused_before_the_first_run(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given, changes, code, says
):
    out = tmp_path / "suite"
    assert main(["suite", "nano", *arguments(data, out, *given, **changes)]) == code
    assert says in capsys.readouterr().err
    assert not out.exists()


def test_the_seed_of_the_config(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train(data, tmp_path / "nano-standard-seed9", train__seed=9)
    given = arguments(data, tmp_path, "--residuals", "standard", "--table", train__seed=9)
    assert main(["suite", "nano", *given]) == 0
    assert "standard" in capsys.readouterr().out


def test_a_look_changes_nothing(suite: Path, data: Path, capsys: pytest.CaptureFixture[str]):
    before = {path: path.stat().st_mtime_ns for path in suite.rglob("*")}
    given = arguments(data, suite, "--table")
    assert main(["suite", "nano", "--residuals", "dar-block", "--seeds", "0", *given]) == 0
    assert "dar-block" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in suite.rglob("*")} == before
    assert main(["suite", "nano", "--residuals", "dar-full", "--seeds", "0", *given]) == 1
    assert f"no run of this suite is finished in {suite}" in capsys.readouterr().err


def test_a_damaged_summary(suite: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    copy = shutil.copytree(suite, tmp_path / "copy")
    (copy / "nano-standard-seed0" / SUMMARY).write_text("{")
    given = arguments(data, copy, "--table")
    assert main(["suite", "nano", "--residuals", "standard", "--seeds", "0", *given]) == 1
    assert f"{copy / 'nano-standard-seed0' / SUMMARY} cannot be read" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_suite_goes_on(data: Path, tmp_path: Path, how: signal.Signals):
    out = tmp_path / "suite"
    command = [sys.executable, "-m", "dualres", "suite", "nano", "--residuals", "standard,attnres-block"]
    command += arguments(data, out, train__tokens=60 * 4 * 32)
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True)
    first = out / "nano-standard-seed42"
    end = time.monotonic() + 120
    while not (first / "metrics.jsonl").exists() or not metrics(first):
        assert time.monotonic() < end
        time.sleep(0.01)
    if how == signal.SIGINT:  # as a terminal does, to all processes of the command
        subprocess.run(["kill", f"-{how.value}", "--", f"-{process.pid}"], check=True)
    else:  # as a scheduler does, to the command
        process.send_signal(how)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "stopped at step" in said
    assert not (first / SUMMARY).exists()
    assert subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode == 0
    assert len(list(out.glob(f"*/{SUMMARY}"))) == 2


@pytest.mark.parametrize("code", [130, -signal.SIGINT], ids=["saved", "second Ctrl-C"])
def test_after_an_interrupted_run_no_other_starts(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commands: list[list[str]] = []

    def start(command: list[str]) -> Any:
        commands.append(command)
        return SimpleNamespace(wait=lambda: code)

    monkeypatch.setattr(subprocess, "Popen", start)
    suite = Suite(all_runs([("nano", "standard")], [0, 1]), tmp_path, tmp_path, force=True)
    with pytest.raises(KeyboardInterrupt):
        run_all(suite, Progress(muted=True))
    [command] = commands
    assert "--force" in command


def test_a_failing_run_does_not_stop_the_others(data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """A rate that overflows fails and is named at the end; the other is in the table."""
    rate: Any = {"train__learning_rate": 0.001, "train__min_learning_rate": 0.0001, "train__warmup_steps": 0}
    train(data, tmp_path / "s" / "nano-standard-lr0.001-seed42", **rate)
    given = arguments(data, tmp_path / "s", "--learning-rates", "1e30,0.001", train__warmup_steps=0)
    assert main(["suite", "nano", "--residuals", "standard", *given]) == 1
    shown = capfd.readouterr()
    assert "nano-standard-lr1e+30-seed42 failed with exit code 1" in shown.err
    assert "1 of 2 runs failed, see above: nano-standard-lr1e+30-seed42" in shown.err.splitlines()[-1]
    assert "0.001" in shown.out


def result(
    scale: str, residual: str, seed: int, loss: float, rate: float | None = None, processes: int = 1
) -> tuple[SuiteRun, Run]:
    summary = {
        "processes": processes,
        "validation_loss": loss,
        "tokens_per_second": 100.0 if residual == "standard" else 80.0,
        "peak_memory": 10,
    }
    changed: Any = {} if rate is None else {"train__learning_rate": rate}
    config = tiny_config(residual, train__seed=seed, **changed)
    run = Run(Path(), config, Path(), "", None, summary, ((1, loss),), ((1, loss),), ())
    return SuiteRun(scale, residual, seed, rate), run


def compared(*found: tuple[SuiteRun, Run]) -> list[ComparisonRow]:
    return comparison.compare(comparison.best_rates(group_by_rate(dict(found))))


def test_each_method_at_its_best_rate():
    found = [
        result("nano", "standard", 0, 3.0, 1e-3),
        result("nano", "standard", 0, 2.5, 3e-3),
        result("nano", "dar-block", 0, 2.4, 1e-3),
        result("nano", "dar-block", 0, 2.6, 3e-3),
    ]
    rows = {row.group.residual: row for row in compared(*found)}
    assert (rows["standard"].group.options, rows["dar-block"].group.options) == ("0.003", "0.001")
    assert rows["dar-block"].difference is not None
    assert rows["dar-block"].difference.mean == pytest.approx(-0.1)
    assert rows["dar-block"].speed_ratio == pytest.approx(0.8)
    assert len(group_by_rate(dict(found))) == 4


def test_a_rate_at_which_seeds_failed_is_not_the_best():
    found = [result("nano", "standard", seed, 2.5 + seed / 10, 1e-3) for seed in (0, 1, 2)]
    found.append(result("nano", "standard", 0, 2.4, 3e-3))  # the seed that did not fail
    [row] = compared(*found)
    assert (row.group.options, row.loss.seeds) == ("0.001", 3)


def test_ratios_are_of_runs_on_equal_hardware():
    ours = compared(result("nano", "standard", 0, 3.0), result("nano", "dar-block", 0, 2.9, processes=2))[1]
    assert (ours.speed_ratio, ours.memory_ratio) == (None, None)
    assert ours.difference is not None


def test_what_the_table_says_beside_the_numbers():
    alone = [result("nano", "dar-block", seed, 3.0) for seed in (0, 1)]
    assert "No run of standard at nano to compare with." in comparison.as_text(compared(*alone))
    one_pair = compared(*alone, result("nano", "standard", 1, 3.1))
    assert "-0.1000 (1 of the seeds)" in comparison.as_text(one_pair)


def test_presets_print_the_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for preset, printed in (("size-sweep", SIZE_SWEEP), ("kv-ablation", KV_ABLATION)):
        assert main(["suite", preset, "--table", "--out", str(tmp_path / preset)]) == 0
        text = capsys.readouterr().out
        lines = text.splitlines()[2:]
        assert len(lines) == len(printed)
        for line, cell in zip(lines, printed, strict=True):
            assert all(part in line for part in (cell.name, cell.scale, cell.loss, "not run"))
    [base], [matched] = (
        [line for line in lines if line.startswith(f"{name}  ")] for name in ("AttnRes", "AttnRes + VProj")
    )
    assert "491,623,680" in base
    assert "491,623,680" in matched  # the ablation is of equal size


def test_a_preset_at_another_scale(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    given = arguments(data, tmp_path / "kv", "--at", "nano", "--table")
    assert main(["suite", "kv-ablation", *given]) == 0
    assert capsys.readouterr().out.count(" nano ") == 6


def test_order_of_the_runs():
    found = all_runs([("nano", "a"), ("nano", "b")], [0, 1])
    assert [(run.residual, run.seed) for run in found] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    run = SuiteRun("x/nano.yaml", "y/mine.yaml", 3, 1e-3)
    assert run.name == "nano-mine-lr0.001-seed3"
    assert run.overrides() == ["train.seed=3", "train.learning_rate=0.001", "train.min_learning_rate=0.0001"]
    assert finished_runs(Suite(found, Path("none"), Path("none"))) == {}
