"""`dualres train` with a fault on one rank: FAULT="2 raises" torchrun … -m tests.parallel.fault_worker train …"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from dualres.cli import main
from dualres.train import checkpoint, loop
from dualres.train.world import World

REASON = "a value that only this rank has"
STEP = 3


def raises(training: loop.Training, *arguments: Any) -> None:
    record(training, *arguments)
    if training.step == STEP:
        raise ValueError(REASON)


def killed_while_saving(folder: Path, world: World) -> dict[str, list[Any]]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it lives on")


if __name__ == "__main__":
    rank, fault = os.environ["FAULT"].split()
    if rank == os.environ["RANK"] and fault == "raises":
        record = loop.Training._record
        setattr(loop.Training, "_record", raises)  # noqa: B010 - mypy takes no other method for it
    elif rank == os.environ["RANK"]:
        checkpoint._sums = killed_while_saving
    sys.exit(main(sys.argv[1:]))
