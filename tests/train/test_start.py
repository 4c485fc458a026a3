"""What `dualres train` refuses or says before it starts: the checks of `--dry-run`."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dualres.cli import main
from dualres.data.prepare import Settings, prepare
from dualres.parallel.mesh import Mesh
from dualres.plan import search
from dualres.plan.estimate import estimate
from dualres.plan.hardware import Hardware
from dualres.plan.memory import ample_memory, stored_memory
from dualres.plan.search import check_device_memory
from dualres.plan.stages import pipeline_ranks
from dualres.train import device, loop, process_group
from dualres.train.loop import TrainResult
from dualres.util.errors import TrainError
from tests.train.tiny import ALONE, overrides, tiny_config

GIB = 2**30


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Fills up where a run would start. The machine has much disk and memory."""
    starts: list[Any] = []

    def train(*given: Any) -> TrainResult:
        starts.append(given)
        return TrainResult(40, True, 1.0)

    monkeypatch.setattr(loop, "train", train)
    monkeypatch.setattr(process_group, "join_world", lambda device: contextlib.nullcontext(ALONE))
    monkeypatch.chdir(tmp_path)
    set_disk(monkeypatch, 10**13)
    set_memory(monkeypatch, 10**13, 10**13)
    return starts


def set_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    disk = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)


def set_memory(monkeypatch: pytest.MonkeyPatch, free: int, total: int) -> None:
    monkeypatch.setattr(device, "free_memory", lambda place: free)
    monkeypatch.setattr(device, "total_memory", lambda place: total)


def set_far_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    set_memory(monkeypatch, 10**6, 10**13)
    monkeypatch.setattr(search, "FAR_TOO_MUCH", 0.0)


def command(data: Path, *more: str, **changes: Any) -> list[str]:
    sets = [word for override in overrides(**changes) for word in ("--set", override)]
    return ["train", "nano", "dar-block", "--data", str(data), "--out", "new", *sets, *more]


def no_estimate(*_: Any) -> None:
    raise AssertionError("with ample memory, nothing is estimated")


def test_nothing_to_say(
    data: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(search, "estimate", no_estimate)
    assert main(command(data)) == 0
    assert len(started) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1  # what is trained


CERTAIN: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "disk": (lambda patch: set_disk(patch, 1000), "0.0 GiB free at new: free space, lower train.keep_checkpoints"),
    "memory": (lambda patch: set_memory(patch, 1000, 1000), "weights, gradients and optimizer state take"),
    "estimate": (lambda patch: set_far_too_little_memory(patch), "GiB free: use train.recompute=full"),
}


@pytest.mark.parametrize(("limit", "says"), CERTAIN.values(), ids=CERTAIN)
def test_what_is_too_small_is_refused_unless_forced(
    limit: Callable[[pytest.MonkeyPatch], None],
    says: str,
    data: Path,
    started: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    limit(monkeypatch)
    assert main(command(data, "--dry-run")) == 1
    assert says in capsys.readouterr().out
    assert main(command(data)) == 1
    err = capsys.readouterr().err
    assert says in err
    assert err.endswith("or use --force\n")
    assert started == []
    assert main(command(data, "--force")) == 0
    assert says in capsys.readouterr().err
    assert len(started) == 1


def test_an_estimate_only_warns(
    data: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    set_memory(monkeypatch, 10**6, 10**13)
    assert main(command(data, "--dry-run")) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory ") and "note" in line]
    assert main(command(data)) == 0
    assert len(started) == 1
    [warning] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("memory: ")]
    assert "GiB free: if it fails, use train.recompute=full" in warning
    assert warning.removeprefix("memory: ") in row


@pytest.mark.parametrize(
    ("more", "changes", "code", "says"),
    [
        (["--data", "nowhere"], {}, 2, "nowhere has no index.json: create it with"),
        ([], {"model__vocab_size": 256}, 1, "257 tokens, more than model.vocab_size=256"),
        ([], {"train__engine": "fsdp2"}, 1, "needs several processes"),
        ([], {"model__context": 2**17, "train__tokens": 2**24}, 2, "too few for a sequence of 131072"),
        (["--wandb", "p"], {}, 2, "pip install -e '.[wandb]'"),
        (["--out", "file"], {}, 1, "file is not a writable folder: use a different --out"),
    ],
    ids=["data", "vocabulary", "engine", "validation", "package", "folder"],
)
def test_what_is_refused(
    more: list[str],
    changes: dict[str, Any],
    code: int,
    says: str,
    data: Path,
    tmp_path: Path,
    started: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "file").touch()
    assert main(command(data, *more, **changes)) == code
    assert says in capsys.readouterr().err.splitlines()[-1]
    assert started == []


def test_a_split_without_validation(tmp_path: Path, started: list[Any], capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.txt").write_text("some words " * 1000)
    prepare(Settings(str(tmp_path / "a.txt"), "bytes", held_out=0), tmp_path / "data")
    assert main(command(tmp_path / "data")) == 2
    assert "the validation split of" in capsys.readouterr().err
    assert started == []


def test_a_short_run_says_how_its_warmup_changes(data: Path, started: list[Any], capsys: pytest.CaptureFixture[str]):
    given = command(data)
    at = given.index("train.warmup_steps=4")
    del given[at - 1 : at + 1]
    for more in (["--dry-run"], []):
        assert main([*given, *more]) == 0
        shown = capsys.readouterr()
        text = shown.out if more else shown.err
        assert "shortened from 50 steps to 10, a quarter of the 40 steps" in text
    [(config, *_)] = started
    assert config.train.warmup_steps == 10


@pytest.mark.axes(residual="standard", feedforward="dense")
@pytest.mark.parametrize("residual", ["standard", "dar-full", "mhc-4", "attnres-vproj"])
@pytest.mark.parametrize("feedforward", ["dense", "moe"])
def test_ample_memory_is_more_than_an_estimate(residual: str, feedforward: str):
    config = tiny_config(residual, feedforward, train__loss_rows=8)  # activations matter most, as in real models
    planned = estimate(config, "single", Mesh(), Hardware())
    minimum = search._minimum_passes(config, Mesh())
    [rank] = pipeline_ranks(config, "single", Mesh(), minimum)
    assert stored_memory(rank) < planned.peak_memory < ample_memory(rank) < 20 * planned.peak_memory
    for total, refused in ((planned.peak_memory / 1.6, True), (planned.peak_memory / 1.4, False)):
        expected = pytest.raises(TrainError, match="or use --force") if refused else contextlib.nullcontext()
        with expected:
            assert check_device_memory(config, 1, 0, total, planned).state == "note"
    enough = ample_memory(rank) / 0.9
    assert check_device_memory(config, 1, enough, enough).state == "ok"
    assert "ample" in check_device_memory(config, 1, enough, enough).details
    assert check_device_memory(config, 1, planned.peak_memory / 0.89, enough).details.startswith("about ")
    assert check_device_memory(config, 1, planned.peak_memory / 0.91, enough).state == "note"
    with pytest.raises(TrainError, match="weights, gradients and optimizer state"):
        check_device_memory(config, 1, 0, stored_memory(rank) - 1)
    with pytest.raises(TrainError, match="about"):
        check_device_memory(config, 1, 0, stored_memory(rank))


def test_ranks_share_the_memory_of_a_machine(
    data: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    planned = estimate(tiny_config(), "single", Mesh(), Hardware())
    set_memory(monkeypatch, 10**6, int(planned.peak_memory))
    assert main(command(data)) == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert main(command(data)) == 1
    assert "or use --force" in capsys.readouterr().err
