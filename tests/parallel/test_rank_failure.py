"""A rank that is killed, hangs or fails: all others stop in time and name it, and torchrun starts them again."""

import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dualres.hub.export import export
from dualres.hub.hf_model import DualResForCausalLM
from dualres.hub.open_model import open_model
from tests.parallel.fault_worker import REASON, STEP
from tests.train.tiny import kill_all, launch, losses, metrics, said

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch was built without gloo")
STEPS, DEADLINE, RANKS = 20, 900, 4
PROGRAM = "tests.parallel.fault_worker"
MESH: dict[str, Any] = {  # tp2·pp2
    "model__layers": 4,
    "model__kv_heads": 2,
    "train__tokens": STEPS * 4 * 32,
    "train__micro_batch": 1,
    "train__checkpoint_every": 3,
    "train__timeout": DEADLINE,
    "train__parallel__tensor": 2,
    "train__parallel__pipeline": 2,
    "train__parallel__sequence_parallel": "true",
    "residual__branches_per_block": 2,
}


def run(data: Path, folder: Path, **changes: Any) -> int:
    """Until it ends by itself. -> its exit code"""
    process = launch(data, folder, **{"ranks": RANKS, **MESH, **changes})
    try:
        return process.wait(DEADLINE)
    finally:
        kill_all(process)


def all_name(lost: int, folder: Path) -> bool:
    """Whether every other rank has said who is lost."""
    others = set(range(RANKS)) - {lost}
    return all(f"rank {lost} of 4 no longer responds: rank {rank} stops too" in said(folder) for rank in others)


def rows(folder: Path) -> int:
    return metrics(folder).count("\n") if (folder / "metrics.jsonl").exists() else 0


@pytest.mark.slow
def test_killed_named_and_taken_up_again(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    alone, whole, folder = (tmp_path / name for name in ("alone", "whole", "killed"))
    for undisturbed, ranks in ((alone, 1), (whole, RANKS)):
        assert run(data, undisturbed, ranks=ranks) == 0, said(undisturbed)[-3000:]
    assert losses(whole) == pytest.approx(losses(alone), rel=1e-5)
    monkeypatch.setenv("FAULT", "2 killed")  # it talks to ranks 0 and 3, never to 1
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
    assert run(data, folder, program=PROGRAM, restarts=1) == 0, said(folder)[-3000:]
    assert all_name(2, folder), said(folder)[-3000:]
    assert "resumed from" in said(folder)
    assert metrics(folder) == metrics(whole)
    # And what four processes have written is one folder for Hugging Face.
    export(folder, tmp_path / "exported")
    exported = DualResForCausalLM.from_pretrained(tmp_path / "exported")
    tokens = torch.arange(20)[None]
    assert torch.equal(exported(tokens).logits, open_model(folder).decoder(tokens))


@pytest.mark.parametrize(
    ("fault", "others"),
    [
        pytest.param("1 killed_at_the_start", "", id="before the first step", marks=pytest.mark.exhaustive),
        pytest.param(
            "3 killed_while_saving",
            "",
            id="while saving: two of the others may wait for each other there",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "2 killed", "sleeps", id="and the others wait inside a library that does not notice", marks=pytest.mark.slow
        ),
    ],
)
def test_killed_and_named(fault: str, others: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("OTHERS", others)
    folder = tmp_path / "killed"
    assert run(data, folder, program=PROGRAM) == 1, said(folder)[-3000:]
    assert all_name(int(fault[0]), folder), said(folder)[-3000:]
    assert "is the disk full?" not in said(folder)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_in_time(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAULT", "1 stopped")
    folder, timeout = tmp_path / "hangs", 60
    process = launch(data, folder, ranks=RANKS, program=PROGRAM, **{**MESH, "train__timeout": timeout})
    try:
        end = begun = time.monotonic()
        while not all_name(1, folder):
            assert process.poll() is None, said(folder)[-3000:]
            assert end - begun < DEADLINE, said(folder)[-3000:]
            if rows(folder) < STEP - 1:
                begun = time.monotonic()
            time.sleep(0.1)
            end = time.monotonic()
        assert end - begun < timeout + 60  # 15 of them for the answers, 5 to stop, and a slow machine
    finally:
        kill_all(process)


@pytest.mark.slow
def test_a_rank_that_waits_for_itself_shows_where(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its thread still answers, so no one is lost: the first that gave up is named, and each shows where it waits."""
    monkeypatch.setenv("FAULT", "1 sleeps")
    folder = tmp_path / "sleeps"
    assert run(data, folder, program=PROGRAM, train__timeout=60) == 1, said(folder)[-3000:]
    assert "no longer" not in said(folder)
    assert "rank 1 stops too (it is still waiting)" in said(folder)
    assert "in sleeps\n" in said(folder)


@pytest.mark.slow
def test_the_reason_of_one_is_given_by_all(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAULT", "2 raises")
    folder = tmp_path / "fails"
    assert run(data, folder, program=PROGRAM) == 1, said(folder)[-3000:]
    assert f"ValueError: {REASON}" in said(folder)
    for rank in (0, 1, 3):
        assert f"rank 2 of 4 has failed ({REASON}): rank {rank} stops too" in said(folder), said(folder)[-3000:]
    assert "no longer" not in said(folder)
    assert rows(folder) >= STEP - 1


@pytest.mark.exhaustive  # test_process_group.py: agents that count for themselves agree on an id
def test_two_agents_start_again(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each agent of torchrun counts the restarts of its own processes."""
    settings = {**MESH, "train__parallel__tensor": 1, "train__parallel__sequence_parallel": "false"}
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    assert run(data, whole, **{**settings, "ranks": 2}) == 0, said(whole)[-3000:]
    monkeypatch.setenv("FAULT", "0 killed")
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = f"localhost:{free.getsockname()[1]}"
    agent = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={place}", "--rdzv-id=two")
    agents = [launch(data, folder, agent=agent, restarts=3, program=PROGRAM, **settings) for _ in range(2)]
    try:
        assert [process.wait(DEADLINE) for process in agents] == [0, 0], said(folder)[-3000:]
    finally:
        for process in agents:
            kill_all(process)
    assert "rank 0 of 2 no longer responds: rank 1 stops too" in said(folder)
    assert "resumed from" in said(folder)
    assert metrics(folder) == metrics(whole)
