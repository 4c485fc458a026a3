"""Runs that are killed, limited and moved: real processes, started as a user starts them."""

import json
import os
import random
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from dualres.train import run_folder
from dualres.train.checkpoint import damage
from tests.train.tiny import STEPS, checkpoints, descendants, kill_all, launch, losses, metrics, rows, said

LONG = 260  # steps, so that a run does not end before it was stopped or killed
DEADLINE = 900  # seconds, for a run that hangs
LONG_RUN: dict[str, Any] = {"train__tokens": LONG * 4 * 32, "train__checkpoint_every": 3}
KILLS = [  # kills, steps
    pytest.param(3, 50, id="three", marks=pytest.mark.slow),
    pytest.param(20, LONG, id="twenty", marks=pytest.mark.exhaustive),
]
needs_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch was built without gloo")
RANKS = [pytest.param(1, id="single"), pytest.param(2, id="fsdp2", marks=needs_gloo)]


def finish(process: subprocess.Popen[str], folder: Path) -> None:
    assert process.wait(DEADLINE) == 0, said(folder)[-3000:]


def rows_there(folder: Path) -> int:
    return metrics(folder).count("\n") if (folder / "metrics.jsonl").exists() else 0


def saving(folder: Path) -> bool:
    return any((folder / run_folder.CHECKPOINTS).glob("*.partial"))


def wait_for(happened, process: subprocess.Popen[str], folder: Path) -> None:
    end = time.monotonic() + DEADLINE
    while not happened():
        assert process.poll() is None, f"it ended by itself: {said(folder)[-3000:]}"
        assert time.monotonic() < end, said(folder)[-3000:]
        time.sleep(0.001)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("kills", "steps"), KILLS)
def test_killed_again_and_again(
    kills: int, steps: int, ranks: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In the middle of a save, and then at random moments, every second time once a save has begun."""
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    long = {**LONG_RUN, "train__tokens": steps * 4 * 32}
    finish(launch(data, whole, ranks=ranks, **long), whole)
    monkeypatch.setenv("FAULT", "0 killed_while_saving")
    assert launch(data, folder, ranks=ranks, program="tests.parallel.fault_worker", **long).wait(DEADLINE) != 0
    assert saving(folder)
    chance = random.Random(0)
    during_a_save = 0
    for kill in range(kills):
        wanted = rows_there(folder) + chance.randint(1, 6)  # a little further than ever before
        process = launch(data, folder, ranks=ranks, **long)
        wait_for(lambda wanted=wanted: rows_there(folder) >= wanted, process, folder)
        if kill % 2 == 0:
            wait_for(lambda: saving(folder), process, folder)
        time.sleep(chance.uniform(0, 0.02))
        kill_all(process)
        assert process.returncode == -signal.SIGKILL
        during_a_save += saving(folder)
    assert during_a_save >= kills // 6  # on a busy machine a save may end before the signal comes
    assert not (folder / run_folder.SUMMARY).exists()
    finish(launch(data, folder, ranks=ranks, **long), folder)
    assert metrics(folder) == metrics(whole)
    ours, wanted_weights = final_weights(folder, steps), final_weights(whole, steps)
    assert ours.keys() == wanted_weights.keys()
    assert all(torch.equal(ours[name], wanted_weights[name]) for name in ours)


def final_weights(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    last = checkpoints(folder)[-1]
    assert json.loads((last / "state.json").read_text())["step"] == steps
    files = sorted((last / "weights").glob("*.safetensors"))
    return {f"{file.name} {name}": tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, id="SIGTERM"), pytest.param(signal.SIGINT, id="Ctrl-C", marks=pytest.mark.slow)],
)
def test_a_signal_ends_the_command_cleanly(number: int, data: Path, tmp_path: Path):
    folder = tmp_path / "run"
    process = launch(data, folder, **LONG_RUN)
    wait_for(lambda: rows_there(folder) > 5, process, folder)
    process.send_signal(number)
    assert process.wait(DEADLINE) == 130, said(folder)[-3000:]
    step = json.loads((checkpoints(folder)[-1] / "state.json").read_text())["step"]
    assert f"stopped at step {step} of {LONG}; saved as {checkpoints(folder)[-1]}" in said(folder)
    assert "Traceback" not in said(folder)


@pytest.mark.slow
def test_ctrl_c_twice_and_at_the_first_step(data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second ends the process within the step; what is on disk resumes. Before a step there is nothing to save."""
    folder = tmp_path / "run"
    for fault, code in (("interrupted_first_step", 130), ("interrupted_twice", -signal.SIGINT)):
        monkeypatch.setenv("FAULT", f"0 {fault}")
        assert launch(data, folder, program="tests.parallel.fault_worker").wait(DEADLINE) == code
        assert "Traceback" not in said(folder)
        assert "FATAL" not in said(folder)
        if code == 130:
            assert said(folder).endswith("dualres: interrupted\n")
            assert checkpoints(folder) == []
    assert said(folder).endswith("stopping after this step; another Ctrl-C stops now, without saving\n")
    assert damage(checkpoints(folder)[-1]) == []
    finish(launch(data, folder), folder)
    assert metrics(folder) == metrics(whole)


@pytest.mark.slow
@needs_gloo
def test_torchrun_passes_the_signal_on(data: Path, tmp_path: Path):
    """Its own exit code says that it was stopped; the workers have saved."""
    folder = tmp_path / "run"
    process = launch(data, folder, ranks=2, **LONG_RUN)
    wait_for(lambda: rows_there(folder) > 5, process, folder)
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE) == 1
    last = checkpoints(folder)[-1]
    assert f"of {LONG}; saved as {last}" in said(folder)
    assert damage(last) == []
    assert not saving(folder)


@pytest.mark.slow
@needs_gloo
def test_a_folder_in_use_is_refused_by_all_ranks_at_once(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also by the one that is last to leave, which torchrun terminates as soon as the other has ended."""
    monkeypatch.setenv("FAULT", "0 late_to_leave")
    folder = tmp_path / "run"
    with run_folder.lock_run(folder):
        process = launch(data, folder, ranks=2, program="tests.parallel.fault_worker")
        assert process.wait(DEADLINE) == 1
    refusal = f"another process is training in {folder}: wait for it, or use a new folder"
    assert f"dualres: {refusal}\n" in said(folder)
    assert f"dualres, rank 1: {refusal}\n" in said(folder)
    assert "Connection closed by peer" not in said(folder)
    assert not (folder / run_folder.CONFIG).exists()


@pytest.mark.slow
@needs_gloo
def test_from_two_ranks_to_one_and_back(data: Path, whole: Path, tmp_path: Path):
    """A run that begins on two, is stopped, goes on alone, is stopped again, and ends on two."""
    folder = tmp_path / "moved"
    ends = []
    for ranks, wanted in ((2, 8), (1, 20), (2, STEPS)):
        process = launch(data, folder, ranks=ranks)
        if wanted < STEPS:
            wait_for(lambda wanted=wanted: rows_there(folder) > wanted, process, folder)
            for worker in descendants(process.pid)[-ranks:]:  # torchrun's workers, or the process itself
                os.kill(worker, signal.SIGTERM)
        # torchrun must not restart ranks that were told to stop.
        assert process.wait(DEADLINE) == (130 if ranks == 1 and wanted < STEPS else 0), said(folder)[-3000:]
        ends.append(checkpoints(folder)[-1].name)
    assert said(folder).count("stopped at step") == 2
    assert all(f"resumed from {folder / run_folder.CHECKPOINTS / name}" in said(folder) for name in ends[:2])
    assert losses(folder) == pytest.approx(losses(whole), rel=1e-5)


def limit_files() -> None:
    """As on a full disk, a file that grows beyond the limit cannot be written; metrics stay below it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))


@pytest.mark.slow
def test_a_full_disk_for_tensorboard(data: Path, whole: Path, tmp_path: Path):
    """It is a view of the metrics, which go on."""
    folder = tmp_path / "run"
    limit = len(metrics(whole)) + 2000  # what TensorBoard writes of the same rows is more than twice as long

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    process = launch(data, folder, limit=limit_files, train__checkpoint_every=100, train__validate_every=100)
    assert process.wait(DEADLINE) == 1  # the checkpoint at the end does not fit either
    assert f"{folder / 'tensorboard'} cannot be written ([Errno 27] File too large): continuing" in said(folder)
    assert len([row for row in rows(folder) if "loss" in row]) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_a_full_disk_during_a_save(ranks: int, data: Path, whole: Path, tmp_path: Path):
    folder = tmp_path / "run"
    process = launch(data, folder, ranks=ranks)
    wait_for(lambda: len(checkpoints(folder)) > 0, process, folder)
    for worker in descendants(process.pid)[-ranks:]:
        os.kill(worker, signal.SIGTERM)
    assert process.wait(DEADLINE) == (130 if ranks == 1 else 0), said(folder)[-3000:]
    before = checkpoints(folder)[-1]
    limited = launch(data, folder, ranks=ranks, limit=limit_files)
    assert limited.wait(DEADLINE) != 0
    assert f"checkpoint {folder / run_folder.CHECKPOINTS / f'step-{STEPS:09d}'} was not saved: " in said(folder)
    assert "File too large" in said(folder)
    assert "is the disk full?" in said(folder)
    assert checkpoints(folder)[-1] == before
    assert damage(before) == []
    assert not saving(folder)
    finish(launch(data, folder, ranks=ranks), folder)
    if ranks == 1:
        assert metrics(folder) == metrics(whole)
    assert losses(folder) == pytest.approx(losses(whole), rel=1e-5)
