"""Starts the processes of a test: workers by `torchrun`, or one process for each rank with a log of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def torchrun(module: str, processes: int, *arguments: str, timeout: int = 1800) -> None:
    """Run a worker to its end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*command, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def assert_nothing_wrong(commands: Sequence[list[str]], folder: Path, timeout: int, cases: Collection[str]) -> None:
    """Run `python …` for each rank. FOLDER/results.json has what went wrong in each case; all `cases` must be there."""
    processes, logs = [], [folder / f"rank{rank}.log" for rank in range(len(commands))]
    for command, log in zip(commands, logs, strict=True):
        with log.open("w") as file:
            environment = {**os.environ, **ENVIRONMENT}
            command = [sys.executable, *command]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file))
    try:
        processes[0].wait(timeout)
        processes[-1].wait(120)
    except subprocess.TimeoutExpired:
        pass  # then a case did not run, or a process ended by the signal below
    finally:
        for process in processes:
            process.kill()
            process.wait()

    written = folder / "results.json"
    results: dict[str, list[str]] = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {}
    wrong = [f"{case}: {line}" for case, lines in results.items() for line in lines]
    wrong += [f"{case}: did not run" for case in cases if case not in results] or ["no case ran"] * (not results)
    wrong += [f"rank {rank} ended with {p.returncode}" for rank, p in enumerate(processes) if p.returncode]
    endings = [f"{log.name}:\n{log.read_text(encoding='utf-8')[-2000:]}" for log in logs]
    assert not wrong, "\n".join([*wrong, *endings])
