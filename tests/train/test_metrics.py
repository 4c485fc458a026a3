"""Rows of a run: cut at a resumption, shown by TensorBoard, and where they cannot be written."""

import json
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dualres.train.metrics import METRICS, Log, read_rows, truncate
from dualres.util.errors import TrainError
from dualres.util.optional_dependencies import MissingExtraError
from tests.train.tiny import rows

LINES = [json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in (1, 2, 3, 3, 4)]


@pytest.mark.parametrize(
    ("content", "step", "kept"),
    [
        pytest.param("".join(LINES), 3, "".join(LINES[:4]), id="later rows go"),
        pytest.param("".join(LINES), 9, "".join(LINES), id="all stay"),
        pytest.param("".join(LINES[:3]) + '{"step": 4, "lo', 9, "".join(LINES[:3]), id="a row cut by a crash goes"),
        pytest.param("".join(LINES[:3]) + "\0\0\0\n", 9, "".join(LINES[:3]), id="a block of zeros after a power cut"),
        pytest.param("", 0, "", id="empty"),
    ],
)
def test_truncate(content: str, step: int, kept: str, tmp_path: Path):
    path = tmp_path / METRICS
    path.write_text(content)
    truncate(path, step)
    assert path.read_text() == kept
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]


def test_no_rows_yet(tmp_path: Path):
    truncate(tmp_path / METRICS, 3)
    assert not list(tmp_path.iterdir())


def test_tensorboard_shows_what_the_metrics_say(whole: Path):
    board = EventAccumulator(str(whole / "tensorboard"))
    board.Reload()
    wanted = {row["step"]: row["loss"] for row in rows(whole) if "loss" in row}
    shown = {event.step: event.value for event in board.Scalars("loss")}
    assert shown == {step: pytest.approx(loss, rel=1e-6) for step, loss in wanted.items()}
    assert {"validation_loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu"} <= set(board.Tags()["scalars"])


def test_without_tensorboard_the_rows_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    log = Log(tmp_path, 0, print)
    log.write(METRICS, 1, loss=2.0)
    log.close()
    assert not (tmp_path / "tensorboard").exists()
    assert read_rows(tmp_path / METRICS) == [{"step": 1, "loss": 2.0}]


def test_rows_that_cannot_be_written(tmp_path: Path):
    log = Log(tmp_path, 0, print)
    log.write(METRICS, 1, loss=2.0)
    log.files[METRICS].close()
    log.files[METRICS] = Path("/dev/full").open("w")  # noqa: SIM115  every write to it says that the disk is full
    with pytest.raises(TrainError, match=rf"{tmp_path / METRICS} cannot be written .*No space left.*resume"):
        log.write(METRICS, 2, loss=1.0)
    log.close()  # what is left in the file's buffer must not hide the message above
    assert [row["step"] for row in read_rows(tmp_path / METRICS)] == [1]


def test_weights_and_biases_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '.\[wandb\]'"):
        Log(tmp_path, 0, print, wandb_project="p")


def test_weights_and_biases_goes_on_with_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    names = []
    for step, folder in ((0, "a/run"), (1, "a/run"), (0, "b/run")):
        path = tmp_path / folder
        path.mkdir(parents=True, exist_ok=True)
        log = Log(path, step, print, wandb_project="p")
        log.write(METRICS, step + 1, loss=1.2345)
        assert log.wandb is not None
        names.append(log.wandb.id)
        log.close()
    assert names[0] == names[1] != names[2]  # the same run after a stop, another in a folder of equal name
    written = list((tmp_path / "a/run/wandb").glob("offline-run-*/*.wandb"))
    assert written
    assert all(b"1.2345" in file.read_bytes() for file in written)
