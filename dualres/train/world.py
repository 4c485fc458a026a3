"""The processes of a run: one, or as many as `torchrun` started."""

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from dualres.train.errors import TrainError
from dualres.train.heap import keep_freed_memory

T = TypeVar("T")
VARIABLES = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}  # set by torchrun, with what one process has


class World(NamedTuple):
    """Who this process is."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup | None  # gloo, for numbers and words between ranks; None for one process
    saving: dist.ProcessGroup | None  # another, for the thread that writes checkpoints

    @property
    def leads(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Each value, added over all ranks."""
        if self.control is None:
            return values
        together = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(together, group=self.control)
        return together.tolist()

    def agree(self, work: Callable[[], T]) -> list[T]:
        """Do something on every rank. -> the results of all; what goes wrong on one is raised on all."""
        return agree(work, self.control)

    def from_leader(self, value: T) -> T:
        """The leader's value, on every rank."""
        if self.control is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]


def agree(work: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """The results of all ranks of a group. A fault of one is raised on all, so that none is left waiting for it."""
    if group is None:
        return [work()]
    result: T | None = None
    own: Exception | None = None
    try:
        result = work()
    except Exception as error:
        own = error
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (result, _sendable(own)), group=group)
    if own is not None:
        raise own  # with its traceback
    for _, fault in answers:
        if fault is not None:
            raise fault
    return [result for result, _ in answers]


def _sendable(error: Exception | None) -> Exception | None:
    """The error as other processes can make it again: some need more arguments than they keep."""
    try:
        return copy.copy(error)
    except Exception:
        return RuntimeError(repr(error))


@contextlib.contextmanager
def join_world(device: str | None = None) -> Iterator[World]:
    """Join the processes that `torchrun` started, or be alone; with a GPU each where there are GPUs."""
    rank, size, local = (int(os.environ.get(name, alone)) for name, alone in VARIABLES.items())
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    place = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        if local >= torch.cuda.device_count():
            raise TrainError(
                f"process {local} of this machine has no GPU: it has {torch.cuda.device_count()}; start that many "
                "with torchrun --nproc-per-node, or train on the CPU with --device cpu"
            )
        torch.cuda.set_device(place)
    else:
        keep_freed_memory()
    if size == 1:
        yield World(0, 1, place, None, None)
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", timeout=timedelta(minutes=30))
    try:
        yield World(rank, size, place, dist.new_group(backend="gloo"), dist.new_group(backend="gloo"))
        dist.barrier()  # without it a process may leave while another still talks to it
    finally:
        dist.destroy_process_group()
