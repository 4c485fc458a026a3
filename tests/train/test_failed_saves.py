"""Saves that fail: of what kind the failure is decides whether the run goes on."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dualres.train.checkpoint import Checkpoints
from dualres.train.process_group import World

GLOO: Any = object()  # a group that is never used


def failing_saves(folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Checkpoints:
    """Of one of two ranks, whose first save fails so."""

    def gather_or_raise(*_: Any) -> None:
        raise error

    monkeypatch.setattr(World, "gather_or_raise", gather_or_raise)
    saves = Checkpoints(folder, World(1, 2, torch.device("cpu"), GLOO, GLOO), keep=1, say=print)
    saves.save(1, {}, {"best_step": 0})
    saves.wait()
    assert saves.failure == f"checkpoint {folder / 'step-000000001'} was not saved: {error}"
    return saves


def test_a_full_disk_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saves = failing_saves(tmp_path, OSError(28, "No space left on device"), monkeypatch)
    saves.save(2, {}, {"best_step": 0})
    saves.wait()


def test_ranks_that_can_no_longer_save_together_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A group that has broken stays so: without a checkpoint, what is trained after it would be lost."""
    saves = failing_saves(tmp_path, RuntimeError("Application timeout caused pair closure"), monkeypatch)
    with pytest.raises(RuntimeError, match=r"pair closure; the ranks can no longer save together: run the same"):
        saves.save(2, {}, {"best_step": 0})


def test_a_rank_is_busy_while_it_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    world = World(0, 1, torch.device("cpu"), None, None, busy=threading.Event())
    saves, seen = Checkpoints(tmp_path, world, keep=1, say=print), []
    begin = Checkpoints._begin

    def watched(self: Checkpoints, partial: Path) -> None:
        seen.append(world.busy.is_set())
        begin(self, partial)

    monkeypatch.setattr(Checkpoints, "_begin", watched)
    assert not world.busy.is_set()
    saves.save(1, {"model.weight": torch.ones(3)}, {"best_step": 0})
    assert saves.saving is not None
    saves.saving.join()
    assert seen == [True]
    assert saves.failure is None
    assert not world.busy.is_set()
