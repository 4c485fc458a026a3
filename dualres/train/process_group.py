"""The processes of a run: one, or as many as `torchrun` started."""

import contextlib
import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from dualres.train.failure_detection import catch_sigterm, failure_responder, named_ranks, report_failed_ranks
from dualres.train.malloc import keep_freed_memory
from dualres.util.amx import avoid_hidden_tiles
from dualres.util.errors import TrainError

T = TypeVar("T")
STARTUP_TIMEOUT = timedelta(minutes=30)  # that ranks have to come, and then for each other until `set_timeout`
VARIABLES = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}  # set by torchrun, with what one process has


class World(NamedTuple):
    """Who this process is."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup | None  # gloo, for numbers and words between ranks; None for one process
    saving: dist.ProcessGroup | None  # another, for the thread that writes checkpoints
    terminated: Callable[[], bool] = lambda: False  # whether SIGTERM has come, which does not end one process of many
    busy: threading.Event = threading.Event()  # set while this rank saves, and may be slow to answer

    @property
    def is_main(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Each value, added over all ranks."""
        if self.control is None:
            return values
        together = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(together, group=self.control)
        return together.tolist()

    def on_main(self, work: Callable[[], object]) -> None:
        """Run `work` on rank 0 alone; the others wait for it, and an exception of it is raised on all."""
        gather_or_raise(work if self.is_main else lambda: None, self.control)

    def gather_or_raise(self, work: Callable[[], T]) -> list[T]:
        """Do something on every rank. -> the results of all; what goes wrong on one is raised on all."""
        return gather_or_raise(work, self.control)

    def broadcast(self, value: T) -> T:
        """The leader's value, on every rank."""
        if self.control is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]


def gather_or_raise(work: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
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
    """The error as other processes can make it again: some hold a file, or need more arguments than they keep."""
    try:
        return pickle.loads(pickle.dumps(error))  # our own, from this process
    except Exception:
        return RuntimeError(repr(error))


def world_size() -> int:
    """How many processes `torchrun` has started."""
    return int(os.environ.get("WORLD_SIZE", VARIABLES["WORLD_SIZE"]))


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
        avoid_hidden_tiles()
    if size == 1:
        yield World(0, 1, place, None, None)
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        timeout=STARTUP_TIMEOUT,
        store=_job_store(),
        rank=rank,
        world_size=size,
    )
    try:
        control, saving = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
        with catch_sigterm() as terminated:
            world = World(rank, size, place, control, saving, terminated, threading.Event())
            with failure_responder(world, terminated, world.busy), report_failed_ranks(world):
                yield world
                dist.barrier()  # without it a process may leave while another still talks to it
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _job_store() -> Any:
    """Where the processes find each other. `torchrun` keeps one store over restarts, with the addresses of the dead."""
    store, rank, size = next(rendezvous("env://", timeout=STARTUP_TIMEOUT))
    return PrefixStore(agree_on_job_id(store, rank, size), store)


def agree_on_job_id(store: Any, rank: int, size: int, limit: timedelta = STARTUP_TIMEOUT) -> str:
    """A name for this start that all its ranks know and no earlier one had. (Each agent of `torchrun` counts its own.)

    Each rank asks with an id of its own. Rank 0 answers whatever id it finds, a dead one's too, until all have heard.
    """
    own, minutes = uuid.uuid4().hex, limit.total_seconds() / 60
    if rank > 0:
        store.set(f"rank {rank} asks", own)
        try:
            store.wait([f"answer to {own}"], limit)
        except RuntimeError as error:
            raise TrainError(f"rank 0 of {size} did not come within {minutes:g} minutes: see its output") from error
        name = store.get(f"answer to {own}").decode()
        store.set(f"{name} has reached rank {rank}", "yes")
        return name
    left, end = set(range(1, size)), time.monotonic() + limit.total_seconds()
    while left:
        for other in left:
            if store.check([f"rank {other} asks"]):
                store.set(f"answer to {store.get(f'rank {other} asks').decode()}", own)
        left = {other for other in left if not store.check([f"{own} has reached rank {other}"])}
        if left and time.monotonic() > end:
            raise TrainError(f"{named_ranks(left)} of {size} did not come within {minutes:g} minutes: see their output")
        time.sleep(0.05)
    return own


def set_timeout(world: World, seconds: float) -> None:
    """Limit how long a rank waits for another; saving waits at least `STARTUP_TIMEOUT`, for a slow disk."""
    if dist.is_initialized():
        limit = timedelta(seconds=seconds)
        for group in dist.distributed_c10d._world.pg_map:
            patience = max(limit, STARTUP_TIMEOUT) if group is world.saving else limit
            dist.distributed_c10d._set_pg_timeout(patience, group)
