"""Failure detection: the surviving ranks report which ranks are unresponsive, or why one failed, and exit in time.

A rank that fails records it in `torchrun`'s store. A thread of every other rank polls the store and responds; ranks
that do not respond in time are unresponsive, and all survivors report the same ones. If all respond, the failed rank
may still be waiting for a checkpoint that all ranks are saving: then the others wait until it has exited.

`torchrun` also sends SIGTERM to the survivors. A main thread may be stuck in a collective with the dead rank and never
notice: then the responder threads, which see the signal, hold a roll call. If all respond, it was a request to stop.
"""

import contextlib
import faulthandler
import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from dualres.util.errors import TrainError
from dualres.util.progress import say_as

if TYPE_CHECKING:
    from dualres.train.process_group import World

# Keys in the store. With thousands of ranks, each polls counters and only one lists the keys of individual ranks.
FAILED, UNRESPONSIVE = "the first rank that failed, and why", "the ranks that did not respond"
CALLED, RESPONSES, DECIDING = "a rank was terminated", "number of responses", "number of ranks that decide"
LEAVING = "number of ranks that exit after a failure"
# Seconds between polls; for all to respond after a failure; to exit once the unresponsive ranks are known; and for
# exiting ranks to wait for each other. The total is below the 30 seconds that torchrun gives the others after the first
# process has exited.
POLL_INTERVAL, RESPONSE_TIME, STOP_TIME, EXIT_TIME = 2.0, 15.0, 5.0, 5.0
TRIES = 5  # attempts with a store that does not reply
NEVER = threading.Event()


@contextlib.contextmanager
def report_failed_ranks(world: "World") -> Iterator[None]:
    """Turn a failed collective into an error that names the unresponsive ranks; if all respond, reraise it."""
    if world.size == 1:
        yield
        return
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        yield
    except Exception as error:
        first = record_failure(store, world, error)
        if isinstance(error, TrainError) or not isinstance(error, RuntimeError):
            raise  # not a failed collective: all ranks raise it, or the others read `first`
        _ignore_sigterm()
        silent = unresponsive_ranks(store, world)
        if not silent and first.startswith(f"rank {world.rank} "):
            raise
        raise TrainError(_stops(world, first, silent, _reason(error))) from error


def record_failure(store: Any, world: "World", error: Exception) -> str:
    """Record why this rank fails, unless another failed first. -> the first failed rank and its reason"""
    own = f"rank {world.rank} of {world.size} has failed ({_reason(error)})"
    with contextlib.suppress(RuntimeError):  # the store may be gone
        _respond(store, world)
        return store.compare_set(FAILED, "", own).decode()
    return own


def unresponsive_ranks(store: Any, world: "World", ended: threading.Event = NEVER) -> list[int]:
    """The ranks that did not respond in time after the first failure; [] if this rank has `ended` by then."""
    with contextlib.suppress(RuntimeError):  # without a store no rank can respond
        _wait(lambda: store.check([UNRESPONSIVE]) or _all_responded(store, world), RESPONSE_TIME, world, ended)
        return [] if ended.is_set() else _decide(store, store, world)
    return []


def _decide(store: Any, responses: Any, world: "World") -> list[int]:
    """The ranks without a response: the first rank to decide does so for all."""
    if store.add(DECIDING, 1) > 1:
        _wait(lambda: store.check([UNRESPONSIVE]), STOP_TIME, world)  # the first to decide may itself be dead
    if not store.check([UNRESPONSIVE]):
        keys = set(responses.list_keys())
        silent = [rank for rank in range(world.size) if _response_key(rank) not in keys]
        store.compare_set(UNRESPONSIVE, "", json.dumps(silent))
    return json.loads(store.get(UNRESPONSIVE))


@contextlib.contextmanager
def catch_sigterm() -> Iterator[Callable[[], bool]]:
    """Keep SIGTERM from ending this process. -> whether it has arrived, for any thread, even if the main one hangs"""
    received, (reader, writer) = threading.Event(), socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)

    def terminated() -> bool:
        with contextlib.suppress(OSError):  # nothing to read, or closed
            while signals := reader.recv(64):
                if signal.SIGTERM in signals:
                    received.set()
        return received.is_set()

    descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield terminated
        signal.signal(signal.SIGTERM, handler)  # after a failure it is ignored until the end
    finally:
        signal.set_wakeup_fd(descriptor)
        for end in (reader, writer):
            end.close()


@contextlib.contextmanager
def failure_responder(world: "World") -> Iterator[None]:
    """A thread that responds for this rank when another fails, even while the main thread waits for that rank."""
    store: Any = dist.distributed_c10d._get_default_store()
    ended = threading.Event()
    args = store.clone(), world, ended
    thread = threading.Thread(target=respond_to_failures, args=args, name="failure responder", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(2 * POLL_INTERVAL)  # a dead store may hold it longer; as a daemon it does not hold the process
        with contextlib.suppress(RuntimeError):
            if store.check([FAILED]):
                exit_together(store, world)


def exit_together(store: Any, world: "World") -> None:
    """Ignore SIGTERM and wait until all others do: when the first process exits, torchrun terminates the survivors,
    and each must print its reason first. It does not wait long for dead or stuck ranks.
    """

    def all_leave() -> bool:
        silent = json.loads(store.get(UNRESPONSIVE)) if store.check([UNRESPONSIVE]) else []
        return store.add(LEAVING, 0) + len(silent) >= world.size

    _ignore_sigterm()
    store.add(LEAVING, 1)
    _wait(all_leave, EXIT_TIME, world)


def respond_to_failures(store: Any, world: "World", ended: threading.Event) -> None:
    for _ in range(TRIES):
        with contextlib.suppress(RuntimeError):
            return _watch(store, world, ended)
        if ended.wait(POLL_INTERVAL):
            return


def _watch(store: Any, world: "World", ended: threading.Event) -> None:
    """Respond to failures, and exit if ranks would wait for each other forever, one of them in its saving thread."""
    roll, called = PrefixStore("roll", store), math.inf  # responses to a roll call, and when it was seen
    while not store.check([FAILED]):
        if world.terminated():
            store.set(CALLED, "yes")
        if math.isinf(called) and store.check([CALLED]):
            _respond(roll, world)
            called = time.monotonic()
        # All ranks save together, and one that writes a large file may respond only afterward.
        late = time.monotonic() - called > RESPONSE_TIME and not world.busy.is_set()
        if late and not _all_responded(roll, world) and _decide(store, roll, world):
            record_failure(store, world, RuntimeError("it was terminated, and not all ranks responded"))
        elif ended.wait(POLL_INTERVAL):
            return
    _respond(store, world)
    silent = unresponsive_ranks(store, world, ended)
    while not silent and store.add(LEAVING, 0) == 0:
        if ended.wait(POLL_INTERVAL):
            return
    if not ended.wait(STOP_TIME if silent else RESPONSE_TIME):
        first = store.get(FAILED).decode()
        say_as(world.rank, _stops(world, first, silent, "it is still waiting"))
        if not silent:  # this may be the rank that the others wait for: show where it hangs
            faulthandler.dump_traceback(file=2)
        os._exit(1)


def _ignore_sigterm() -> None:
    """torchrun sends SIGTERM to all survivors of a failure; they exit on their own and print why first."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _respond(store: Any, world: "World") -> None:
    if store.add(_response_key(world.rank), 1) == 1:  # once, by whichever of its threads is first
        store.add(RESPONSES, 1)


def _response_key(rank: int) -> str:
    return f"rank {rank} is here"


def _all_responded(store: Any, world: "World") -> bool:
    return store.add(RESPONSES, 0) >= world.size


def _wait(condition: Callable[[], bool], seconds: float, world: "World", ended: threading.Event = NEVER) -> None:
    """Poll for up to `seconds` or until `ended`; all ranks together send the store at most 10,000 requests a second."""
    end, pause = time.monotonic() + seconds, max(0.05, 4 * world.size / 10_000)  # two requests each, from two threads
    while time.monotonic() < end and not condition() and not ended.wait(pause):
        pass


def _stops(world: "World", first: str, silent: Collection[int], reason: str) -> str:
    respond = "responds" if len(silent) == 1 else "respond"
    cause = f"{named_ranks(silent)} of {world.size} no longer {respond}" if silent else first
    return (
        f"{cause}: rank {world.rank} stops too ({reason}). Run the same command to resume from the last checkpoint; "
        "torchrun --max-restarts N does so automatically"
    )


def named_ranks(ranks: Collection[int]) -> str:
    """A list of ranks such as `rank 3`, or `ranks 1, 3`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def _reason(error: BaseException) -> str:
    """The first line of the root cause: a pipeline wraps the errors of its stages."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
