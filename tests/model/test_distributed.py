"""DDP and FSDP2 on two processes compute what one process computes on the whole batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.model.distributed_worker import GROUPS, RANKS

ROOT = Path(__file__).parents[2]
TIMEOUT = 240  # seconds; a collective that never ends gives up after 60
VIEWS = "error:FSDP2-wrapped module"  # it warns of a block that returns a view, which hides its backward hook


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch was built without gloo")
@pytest.mark.parametrize("group", GROUPS)
def test_two_processes_equal_one(group: str, tmp_path: Path):
    """All cases of a group in one launch, hence in one test: a launch costs more than ten cases."""
    processes, logs = [], [tmp_path / f"rank{rank}.log" for rank in range(RANKS)]
    for rank, log in enumerate(logs):
        command = [sys.executable, "-W", VIEWS, "-m", "tests.model.distributed_worker", str(rank), str(tmp_path), group]
        with log.open("w") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file))
    try:
        processes[0].wait(TIMEOUT)
        processes[1].wait(30)
    except subprocess.TimeoutExpired:
        pass  # then a case did not run, or a process ended by the signal below
    finally:
        for process in processes:
            process.kill()
            process.wait()

    written = tmp_path / "results.json"
    results: dict[str, list[str]] = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {}
    wrong = [f"{case}: {line}" for case, lines in results.items() for line in lines]
    wrong += [f"{case}: did not run" for case in GROUPS[group] if case not in results]
    wrong += [f"rank {rank} ended with {p.returncode}" for rank, p in enumerate(processes) if p.returncode]
    endings = [f"{log.name}:\n{log.read_text(encoding='utf-8')[-2000:]}" for log in logs]
    assert not wrong, "\n".join([*wrong, *endings])
