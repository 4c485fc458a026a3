"""`dualres train` with a fault on one rank: FAULT="2 raises" torchrun … -m tests.parallel.fault_worker train …"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

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


def leaves_late() -> None:
    time.sleep(3)  # longer than torchrun takes to notice that another has ended
    destroy_process_group()


if __name__ == "__main__":
    rank, fault = os.environ["FAULT"].split()
    record, destroy_process_group = loop.Training._record, dist.destroy_process_group
    places = {
        "raises": (loop.Training, "_record", raises),
        "killed_while_saving": (checkpoint, "_sums", killed_while_saving),
        "leaves_late": (dist, "destroy_process_group", leaves_late),
    }
    if rank == os.environ["RANK"]:
        setattr(*places[fault])
    sys.exit(main(sys.argv[1:]))
