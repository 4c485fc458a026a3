"""The processes of a run: one, or as many as `torchrun` started."""

import contextlib
import ctypes
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
from dualres.util.amx import avoid_hidden_tiles
from dualres.util.errors import TrainError

T = TypeVar("T")
STARTUP_TIMEOUT = timedelta(minutes=30)  # for ranks to join, and for all collectives until `set_timeout`
VARIABLES = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}  # set by torchrun, with the values of a single process
MALLOPT = ((-1, -1), (-4, 0))  # glibc's M_TRIM_THRESHOLD: never trim; M_MMAP_MAX: never mmap


class World(NamedTuple):
    """This process among the processes of a run."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup | None  # gloo, for numbers and objects; None for a single process
    saving: dist.ProcessGroup | None  # another gloo group, for the thread that writes checkpoints
    terminated: Callable[[], bool] = threading.Event().is_set  # SIGTERM has arrived; it does not kill a multi-rank run
    busy: threading.Event = threading.Event()  # set while this rank saves, when it may respond late

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes files for all."""
        return self.rank == 0

    def on_main(self, work: Callable[[], object]) -> None:
        """Run `work` on rank 0 while the others wait; its exception is raised on all."""
        self.gather_or_raise(work if self.is_main else lambda: None)

    def gather_or_raise(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return all results; an exception on one rank is raised on all, so none hangs."""
        if self.control is None:
            return [work()]
        result: T | None = None
        own: Exception | None = None
        try:
            result = work()
        except Exception as error:
            own = error
        results_and_errors: list[Any] = [None] * self.size
        dist.all_gather_object(results_and_errors, (result, _picklable(own)), group=self.control)
        if own is not None:
            raise own  # with its traceback
        for _, other in results_and_errors:
            if other is not None:
                raise other
        return [result for result, _ in results_and_errors]

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.control is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]


def _picklable(error: Exception | None) -> Exception | None:
    """The error, or a stand-in if it cannot be pickled: some exceptions hold a file, or lose arguments."""
    try:
        return pickle.loads(pickle.dumps(error))  # safe: pickled by this process
    except Exception:
        return RuntimeError(repr(error))


def world_size() -> int:
    """The number of processes that `torchrun` has started."""
    return int(os.environ.get("WORLD_SIZE", VARIABLES["WORLD_SIZE"]))


@contextlib.contextmanager
def join_world(device: str | None = None) -> Iterator[World]:
    """Join the processes that `torchrun` started, or run as a single one; each gets a GPU if there are GPUs."""
    rank, size, local = (int(os.environ.get(name, default)) for name, default in VARIABLES.items())
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    place = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        if local >= torch.cuda.device_count():
            raise TrainError(
                f"LOCAL_RANK={local} has no GPU: this machine has {torch.cuda.device_count()}; use at most that many "
                "with torchrun --nproc-per-node, or --device cpu"
            )
        torch.cuda.set_device(place)
    else:
        keep_freed_memory()
        avoid_hidden_tiles()
    if size == 1:
        yield World(0, 1, place, None, None)
        return
    store, *_ = next(rendezvous("env://", timeout=STARTUP_TIMEOUT))
    # A unique prefix: `torchrun` keeps one store across restarts, with the addresses of dead processes.
    store = PrefixStore(agree_on_job_id(store, rank, size), store)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=STARTUP_TIMEOUT, store=store, rank=rank, world_size=size)
    try:
        control, saving = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
        with catch_sigterm() as terminated:
            world = World(rank, size, place, control, saving, terminated, threading.Event())
            with failure_responder(world), report_failed_ranks(world):
                yield world
                dist.barrier()  # otherwise a process may exit while another still communicates with it
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def keep_freed_memory() -> None:
    """Stop glibc from returning freed memory to the OS between steps: the OS would zero every page again.

    Do nothing with other C libraries, or if the user has set `MALLOC_…` or `GLIBC_TUNABLES`.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, TypeError, OSError):  # another C library, or no handle to the running program
        return
    for option in MALLOPT:
        mallopt(*option)


def agree_on_job_id(store: Any, rank: int, size: int, limit: timedelta = STARTUP_TIMEOUT) -> str:
    """An id of this start that all its ranks share and no earlier start used. (Agents of `torchrun` count separately.)

    Every rank asks with its own id. Rank 0 answers every id it finds, even a dead rank's, until all have replied.
    """
    own, minutes = uuid.uuid4().hex, limit.total_seconds() / 60
    if rank > 0:
        store.set(f"rank {rank} asks", own)
        try:
            store.wait([f"answer to {own}"], limit)
        except RuntimeError as error:
            raise TrainError(f"rank 0 of {size} did not join within {minutes:g} minutes: see its output") from error
        job = store.get(f"answer to {own}").decode()
        store.set(f"{job} has reached rank {rank}", "yes")
        return job
    missing, end = set(range(1, size)), time.monotonic() + limit.total_seconds()
    while missing:
        for other in missing:
            if store.check([f"rank {other} asks"]):
                store.set(f"answer to {store.get(f'rank {other} asks').decode()}", own)
        missing = {other for other in missing if not store.check([f"{own} has reached rank {other}"])}
        if missing and time.monotonic() > end:
            raise TrainError(
                f"{named_ranks(missing)} of {size} did not join within {minutes:g} minutes: see their output"
            )
        time.sleep(0.05)
    return own


def set_timeout(world: World, seconds: float) -> None:
    """Limit how long a rank waits for another; a save may take `STARTUP_TIMEOUT` or longer, for a slow disk."""
    if dist.is_initialized():
        limit = timedelta(seconds=seconds)
        for group in dist.distributed_c10d._world.pg_map:
            timeout = max(limit, STARTUP_TIMEOUT) if group is world.saving else limit
            dist.distributed_c10d._set_pg_timeout(timeout, group)
