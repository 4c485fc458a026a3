"""What a run has when it is taken up again, and when it may be."""

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dualres.hub.open_model import find_checkpoint
from dualres.train import run_folder
from dualres.train.checkpoint import STATE, Checkpoints, step_name
from dualres.util.errors import TrainError
from tests.train.tiny import STEPS, Told, checkpoints, metrics, terminate, tiny_config, train_tiny


def test_the_best_so_far(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stopped after the best: it stays the best, and is kept."""
    validated = iter([5.0, 3.0, 4.0, 4.0, 4.0, 4.0, 3.5, 4.0, 4.0, 4.0])  # every fourth step
    monkeypatch.setattr("dualres.train.loop.Training._mean_validation_loss", lambda _: next(validated))
    config = tiny_config(train__validate_every=4)
    train_tiny(config, data, tmp_path, Told(21, terminate))
    assert [path.name for path in checkpoints(tmp_path)] == [step_name(step) for step in (8, 20, 22)]
    train_tiny(config, data, tmp_path)
    summary = json.loads((tmp_path / run_folder.SUMMARY).read_text())
    assert (summary["best_step"], summary["best_validation_loss"], summary["validation_loss"]) == (8, 3.0, 4.0)
    assert [path.name for path in checkpoints(tmp_path)] == [step_name(step) for step in (8, 36, 40)]
    assert find_checkpoint(tmp_path, "best").name == step_name(8)


def test_the_last_validation_loss(data: Path, tmp_path: Path):
    """Killed between the last checkpoint and the summary: the next start writes it."""
    config = tiny_config(train__tokens=8 * 4 * 32)
    train_tiny(config, data, tmp_path)
    before = json.loads((tmp_path / run_folder.SUMMARY).read_text())
    (tmp_path / run_folder.SUMMARY).unlink()
    assert train_tiny(config, data, tmp_path).finished
    after = json.loads((tmp_path / run_folder.SUMMARY).read_text())
    assert after["validation_loss"] == before["validation_loss"] > 0


def test_the_random_state(data: Path, tmp_path: Path):
    """A model that draws while it trains, with dropout say, would go on with the same numbers."""
    folder = tmp_path / "run"
    config = tiny_config()
    torch.manual_seed(1)
    train_tiny(config, data, folder, Told(7, terminate))
    saved = torch.get_rng_state()
    torch.manual_seed(2)
    train_tiny(config, data, folder)
    assert torch.equal(torch.get_rng_state(), saved)


def test_what_is_saved_is_of_its_step(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Steps go on while a save is slow: it must hold what the weights were, not what they are."""
    config = tiny_config(train__tokens=8 * 4 * 32, train__checkpoint_every=100)
    train_tiny(config, data, tmp_path / "quick", Told(3, terminate))  # saved at its stop, after step 4
    begin, later = Checkpoints._begin, threading.Event()

    def slowly(self: Checkpoints, partial: Path) -> None:
        assert later.wait(60)
        begin(self, partial)

    monkeypatch.setattr(Checkpoints, "_begin", slowly)
    config = tiny_config(train__tokens=8 * 4 * 32, train__checkpoint_every=4)
    train_tiny(config, data, tmp_path / "slow", Told(6, later.set))
    quick, slow = (
        load_file(next((tmp_path / name / "checkpoints" / "step-000000004" / "weights").glob("*.safetensors")))
        for name in ("quick", "slow")
    )
    assert quick.keys() == slow.keys()
    assert all(torch.equal(quick[name], slow[name]) for name in quick)


def test_a_start_that_was_refused_binds_no_one(data: Path, whole: Path, tmp_path: Path):
    """The message says what to change, so the changed command must work."""
    with pytest.raises(ValueError, match=r"model\.context"):
        train_tiny(tiny_config(model__context=100_000, train__tokens=4 * 10**6), data, tmp_path)
    assert train_tiny(tiny_config(), data, tmp_path).finished
    assert metrics(tmp_path) == metrics(whole)


def test_the_micro_batch_of_a_sparse_model_stays(data: Path, tmp_path: Path):
    """Routers balance each micro-batch: its size is part of the objective."""
    train_tiny(tiny_config("standard", "moe"), data, tmp_path, Told(3, terminate))
    with pytest.raises(TrainError, match=r"train\.micro_batch 2 → 4"):
        train_tiny(tiny_config("standard", "moe", train__micro_batch=4), data, tmp_path)


def test_a_key_that_an_older_version_did_not_have(data: Path, tmp_path: Path):
    train_tiny(tiny_config(), data, tmp_path, Told(3, terminate))
    described = json.loads((tmp_path / run_folder.CONFIG).read_text())
    del described["config"]["train"]["documents"]
    (tmp_path / run_folder.CONFIG).write_text(json.dumps(described))
    assert train_tiny(tiny_config(), data, tmp_path).finished
    assert json.loads((checkpoints(tmp_path)[-1] / STATE).read_text())["step"] == STEPS
