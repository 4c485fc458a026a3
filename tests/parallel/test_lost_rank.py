"""A rank that is killed, hangs or fails: all others stop in time and name it, and torchrun starts them again."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dualres.hub.export import export
from dualres.hub.model import DualResForCausalLM
from dualres.train.load import load_run
from tests.parallel.fault_worker import REASON, STEP
from tests.train.tiny import checkpoints, descendants, kill_all, launch, losses, metrics, said

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch was built without gloo"),
]
STEPS, DEADLINE, TIMEOUT, RANKS = 20, 300, 30, 4
MESH: dict[str, Any] = {  # tp2·pp2
    "model__layers": 4,
    "model__kv_heads": 2,
    "train__tokens": STEPS * 4 * 32,
    "train__micro_batch": 1,
    "train__checkpoint_every": 3,
    "train__timeout": TIMEOUT,
    "train__parallel__tensor": 2,
    "train__parallel__pipeline": 2,
    "train__parallel__sequence_parallel": "true",
    "residual__layers_per_block": 1,
}


def worker(rank: int, *agents: subprocess.Popen[str]) -> int:
    """The process of a rank, found by the environment that torchrun gave it."""
    for pid in [pid for agent in agents for pid in descendants(agent.pid)[1:]]:
        with contextlib.suppress(OSError):  # it may just have ended
            if b"RANK=%d" % rank in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
    raise AssertionError(f"no process has rank {rank}")


def wait_until(happened, process: subprocess.Popen[str], folder: Path) -> None:
    end = time.monotonic() + DEADLINE
    while not happened():
        assert process.poll() is None, said(folder)[-3000:]
        assert time.monotonic() < end, said(folder)[-3000:]
        time.sleep(0.01)


def all_name(lost: int, folder: Path) -> bool:
    """Whether every other rank has said who is lost."""
    others = set(range(RANKS)) - {lost}
    return all(f"rank {lost} of 4 no longer answers: rank {rank} stops too" in said(folder) for rank in others)


def rows(folder: Path) -> int:
    return metrics(folder).count("\n") if (folder / "metrics.jsonl").exists() else 0


def test_killed_named_and_taken_up_again(data: Path, tmp_path: Path):
    alone, whole, folder = (tmp_path / name for name in ("alone", "whole", "killed"))
    for undisturbed, ranks in ((alone, 1), (whole, RANKS)):
        assert launch(data, undisturbed, ranks=ranks, **MESH).wait(DEADLINE) == 0, said(undisturbed)[-3000:]
    assert losses(whole) == pytest.approx(losses(alone), rel=1e-5)
    process = launch(data, folder, ranks=RANKS, restarts=1, **MESH)
    try:
        wait_until(lambda: rows(folder) >= 8 and checkpoints(folder), process, folder)
        os.kill(worker(2, process), signal.SIGKILL)  # it talks to ranks 0 and 3, never to 1
        assert process.wait(DEADLINE) == 0, said(folder)[-3000:]
    finally:
        kill_all(process)
    assert all_name(2, folder), said(folder)[-3000:]
    assert "resumed from" in said(folder)
    assert metrics(folder) == metrics(whole)
    # And what four processes have written is one folder for Hugging Face.
    export(folder, tmp_path / "exported")
    exported = DualResForCausalLM.from_pretrained(tmp_path / "exported")
    tokens = torch.arange(20)[None]
    assert torch.equal(exported(tokens).logits, load_run(folder).decoder(tokens))


def test_a_rank_that_hangs_is_named_in_time(data: Path, tmp_path: Path):
    folder = tmp_path / "hangs"
    process = launch(data, folder, ranks=RANKS, **MESH)
    try:
        wait_until(lambda: rows(folder) >= 5, process, folder)
        os.kill(worker(1, process), signal.SIGSTOP)
        begun = time.monotonic()
        wait_until(lambda: all_name(1, folder), process, folder)
        assert time.monotonic() - begun < TIMEOUT + 40  # 15 of them for the answers, 5 to stop, and a slow machine
    finally:
        kill_all(process)


def test_killed_while_saving(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The others save too, in a thread: two of them may wait for each other there, and stop all the same."""
    monkeypatch.setenv("FAULT", "3 killed_while_saving")
    folder = tmp_path / "killed"
    patient = {**MESH, "train__timeout": 2 * DEADLINE}
    process = launch(data, folder, ranks=RANKS, program="tests.parallel.fault_worker", **patient)
    try:
        assert process.wait(DEADLINE) == 1, said(folder)[-3000:]
    finally:
        kill_all(process)
    assert all_name(3, folder), said(folder)[-3000:]
    assert "is the disk full?" not in said(folder)
    assert not checkpoints(folder)


def test_the_reason_of_one_is_given_by_all(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAULT", "2 raises")
    folder = tmp_path / "fails"
    process = launch(data, folder, ranks=RANKS, program="tests.parallel.fault_worker", **MESH)
    try:
        assert process.wait(DEADLINE) == 1, said(folder)[-3000:]
    finally:
        kill_all(process)
    assert f"ValueError: {REASON}" in said(folder)
    for rank in (0, 1, 3):
        assert f"rank 2 of 4 has failed ({REASON}): rank {rank} stops too" in said(folder), said(folder)[-3000:]
    assert "no longer" not in said(folder)
    assert rows(folder) >= STEP


def test_two_agents_start_again(data: Path, tmp_path: Path):
    """Each agent of torchrun counts the restarts of its own processes."""
    settings = {**MESH, "train__parallel__tensor": 1, "train__parallel__sequence_parallel": "false"}
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    assert launch(data, whole, ranks=2, **settings).wait(DEADLINE) == 0, said(whole)[-3000:]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = f"localhost:{free.getsockname()[1]}"
    agent = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={place}", "--rdzv-id=two")
    agents = [launch(data, folder, agent=agent, restarts=3, **settings) for _ in range(2)]
    try:
        wait_until(lambda: rows(folder) >= 8 and checkpoints(folder), agents[0], folder)
        os.kill(worker(0, *agents), signal.SIGKILL)
        assert [process.wait(DEADLINE) for process in agents] == [0, 0], said(folder)[-3000:]
    finally:
        for process in agents:
            kill_all(process)
    assert "rank 0 of 2 no longer answers: rank 1 stops too" in said(folder)
    assert "resumed from" in said(folder)
    assert metrics(folder) == metrics(whole)
