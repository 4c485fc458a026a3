"""`dualres train` with a fault on one rank: FAULT="2 raises" torchrun … -m tests.parallel.fault_worker train …

It happens once, where ONCE names a file that is not there yet.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dualres.__main__ import run
from dualres.train import checkpoint, loop

REASON = "a value that only this rank has"
STEP = 8  # after two saves, of which the first is whole


def raises(*_: Any) -> None:
    raise ValueError(REASON)


def killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupted(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupted_twice(*_: Any) -> None:
    interrupted()
    interrupted()


def stopped(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleeps(*_: Any) -> None:
    time.sleep(3600)


def late(*_: Any) -> None:
    time.sleep(3)  # longer than torchrun takes to notice that another has ended


def at_step(training: loop.Training, *_: Any) -> bool:
    return training.step == STEP


def at_the_first_step(training: loop.Training, *_: Any) -> bool:
    return training.step == 0


def at_once(*_: Any) -> bool:
    return True


def before(owner: Any, name: str, fault: Callable[..., None], when: Callable[..., bool] = at_once) -> None:
    """Let it happen when the function is called."""
    function, once = getattr(owner, name), os.environ.get("ONCE")

    def faulty(*arguments: Any, **options: Any) -> Any:
        if when(*arguments) and not (once and Path(once).exists()):
            if once:
                Path(once).touch()
            fault()
        return function(*arguments, **options)

    setattr(owner, name, faulty)


FAULTS: dict[str, Callable[[], None]] = {
    "raises": lambda: before(loop.Training, "_record", raises, at_step),
    "killed": lambda: before(loop.Training, "_record", killed, at_step),
    "interrupted_twice": lambda: before(loop.Training, "_record", interrupted_twice, at_step),
    "interrupted_first_step": lambda: before(loop.Training, "_micro_batches", interrupted, at_the_first_step),
    "stopped": lambda: before(loop.Training, "_record", stopped, at_step),
    "sleeps": lambda: before(loop.Training, "_record", sleeps, at_step),
    "killed_at_the_start": lambda: before(loop, "build_engine", killed),
    "killed_while_saving": lambda: before(checkpoint, "_sums", killed),
    "late_to_leave": lambda: before(dist, "destroy_process_group", late),
}

if __name__ == "__main__":
    rank, fault = os.environ["FAULT"].split()
    if rank == os.environ.get("RANK", "0"):
        FAULTS[fault]()
    elif os.environ.get("OTHERS"):
        FAULTS[os.environ["OTHERS"]]()
    run()
