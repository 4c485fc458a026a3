"""A power cut: whatever gets its name is on disk by then, or the name could lead to a file without its content."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualres.data.shards import ShardWriter
from dualres.train.checkpoint import Checkpoints
from dualres.train.metrics import METRICS, SPEED
from dualres.util.atomic_files import new_folder, write_json
from tests.train.tiny import ALONE, Told, terminate, tiny_config, train_tiny


class Disk:
    """Remembers which files and folders were flushed to disk, and what was not yet when it was renamed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.flushed: set[Path] = set()
        self.missing: dict[str, list[str]] = {}  # by the new name, in the order of renaming
        fsync = os.fsync

        def flush(descriptor: int) -> None:
            self.flushed.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", flush)
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self.renaming(getattr(os, name)))

    def renaming(self, rename: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def call(source: str | Path, target: str | Path) -> None:
            before, after = Path(source), Path(target)
            content = [before, *before.rglob("*")]
            self.missing[after.name] = [path.name for path in content if path not in self.flushed]
            self.flushed |= {after / path.relative_to(before) for path in content if path in self.flushed}
            self.flushed.discard(after.parent)  # it has a new entry
            rename(source, target)

        return call


def file(folder: Path) -> str:
    write_json(folder / "made", {"a": 1})
    return "made"


def folder(folder: Path) -> str:
    with new_folder(folder / "made") as partial:
        (partial / "a.txt").write_text("a")
    return "made"


def checkpoint(folder: Path) -> str:
    saves = Checkpoints(folder, ALONE, keep=1, say=print)
    saves.save(1, {"model.weight": torch.ones(3), "optimizer.step.weight": torch.ones(())}, {"best_step": 1})
    saves.wait()
    assert saves.failure is None
    return "step-000000001"


@pytest.mark.parametrize("make", [file, folder, checkpoint])
def test_it_is_on_disk_before_it_has_its_name(make: Callable[[Path], str], tmp_path: Path, monkeypatch: Any):
    disk = Disk(monkeypatch)
    assert disk.missing[make(tmp_path)] == []
    assert tmp_path in disk.flushed  # the name itself


def test_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The index, which is written last, flushes its name too."""
    disk = Disk(monkeypatch)
    writer = ShardWriter(tmp_path / "made", "uint16")
    writer.add(np.arange(5, dtype=np.uint32))
    writer.close()
    assert disk.missing == {"made": []}


def test_the_rows_that_a_checkpoint_relies_on(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = Disk(monkeypatch)
    train_tiny(tiny_config(train__checkpoint_every=100), data, tmp_path, Told(3, terminate))
    assert disk.missing["step-000000004"] == []
    assert {tmp_path / METRICS, tmp_path / SPEED} <= disk.flushed
