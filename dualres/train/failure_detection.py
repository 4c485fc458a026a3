"""Faults among the processes of a run: those that are left name who is lost, or why one has failed, and stop in time.

A rank that fails writes so into the store that `torchrun` keeps. A thread of every other rank looks there and answers;
who has not answered in time is lost, and all say the same. Where all have answered, the one that failed may still wait
for a checkpoint that all are saving: then the others have time until it has left.

`torchrun` also terminates those that are left. A main thread may wait inside a library for the lost one and notice
nothing: then the answering threads, which hear of the signal, call the roll. Where all answer, someone wants to stop.
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
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from dualres.util.errors import TrainError
from dualres.util.progress import say_as

# In the store. Of many thousand ranks each asks for counts, and one alone for names.
FAILED, UNRESPONSIVE = "the first rank that failed, and why", "the ranks that did not answer"
CALLED, ANSWERS, COUNTS = "a rank was terminated", "how many have answered", "how many look who has not"
LEFT, LEAVING, ALL_LEAVE = "a rank has left after a failure", "how many leave", "all that are left leave"
# Seconds between looks whether a rank has failed; that all have to answer then; to stop when the lost are known; and
# that those who leave wait for each other.
# Together less than the 30 that torchrun leaves the others, from when the first process ended until it kills them.
LOOK, ANSWER, STOP, LEAVE = 2.0, 15.0, 5.0, 5.0
TRIES = 5  # of a store that does not reply
NEVER = threading.Event()


class Rank(Protocol):
    """A rank of so many."""

    @property
    def rank(self) -> int:
        """Its number."""

    @property
    def size(self) -> int:
        """How many there are."""


@contextlib.contextmanager
def report_failed_ranks(member: Rank) -> Iterator[None]:
    """Where ranks can no longer talk, name those that do not answer; where all do, the error stays what it is."""
    if member.size == 1:
        yield
        return
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        yield
    except Exception as error:
        first = record_failure(store, member, error)
        if isinstance(error, TrainError) or not isinstance(error, RuntimeError):
            raise  # not for want of another rank: all have it, or the others are told by `first`
        _ignore_sigterm()
        lost = unresponsive_ranks(store, member)
        if not lost and first.startswith(f"rank {member.rank} "):
            raise
        raise TrainError(_stops(member, first, lost, _reason(error))) from error


def record_failure(store: Any, member: Rank, error: Exception) -> str:
    """Write down why this rank fails, if it is the first. -> who was the first, and why"""
    own = f"rank {member.rank} of {member.size} has failed ({_reason(error)})"
    with contextlib.suppress(RuntimeError):  # the store may be gone
        _here(store, member)
        return store.compare_set(FAILED, "", own).decode()
    return own


def unresponsive_ranks(store: Any, member: Rank, ended: threading.Event = NEVER) -> list[int]:
    """The ranks that did not answer in time after the first failure: what the first rank to know has written.

    Whoever waits for it has until this rank has `ended`.
    """
    end = time.monotonic() + ANSWER
    with contextlib.suppress(RuntimeError):  # without a store there is no one to ask
        while time.monotonic() < end and not store.check([UNRESPONSIVE]) and not _all_here(store, member):
            if ended.wait(_pause(member)):
                return []
        return _verdict(store, store, member)
    return []


def _verdict(store: Any, answers: Any, member: Rank) -> list[int]:
    """Who is lost, by the answers that are there: one counts for all."""
    if store.add(COUNTS, 1) > 1:
        _wait(store, member, UNRESPONSIVE, STOP)  # the first that counts may itself be lost
    if not store.check([UNRESPONSIVE]):
        silent = [] if _all_here(answers, member) else _silent(answers, range(member.size))
        store.compare_set(UNRESPONSIVE, "", json.dumps(silent))
    return json.loads(store.get(UNRESPONSIVE))


def _silent(answers: Any, ranks: range) -> list[int]:
    """Those of `ranks` that have not answered, by halves."""
    if answers.check([_is_here(rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return [*ranks]
    middle = len(ranks) // 2
    return _silent(answers, ranks[:middle]) + _silent(answers, ranks[middle:])


@contextlib.contextmanager
def catch_sigterm() -> Iterator[Callable[[], bool]]:
    """SIGTERM does not end this process. -> whether it has come, for every thread, while the main one waits too"""
    came, (reader, writer) = threading.Event(), socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)

    def terminated() -> bool:
        with contextlib.suppress(OSError):  # nothing there, or closed
            while signals := reader.recv(64):
                if signal.SIGTERM in signals:
                    came.set()
        return came.is_set()

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
def failure_responder(member: Rank, terminated: Callable[[], bool], busy: threading.Event) -> Iterator[None]:
    """A thread that answers for this rank when another fails, also while this one waits for that other.

    `terminated`: whether SIGTERM has come. `busy`: set while ranks save, and may be slow to answer.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    ended = threading.Event()
    given = store.clone(), member, ended, terminated, busy
    thread = threading.Thread(target=_answer, args=given, name="answering", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(2 * LOOK)  # a store that has gone may keep it longer, and it does not keep the process
        with contextlib.suppress(RuntimeError):
            if store.check([FAILED]):
                store.set(LEFT, "yes")
                exit_together(store, member)


def exit_together(store: Any, member: Rank) -> None:
    """Ignore SIGTERM, and wait until all others do: when the first process ends, torchrun terminates those that are
    left, and each has to say why it stops. Whoever is lost, or still waits for another, is not waited for long.
    """
    _ignore_sigterm()
    lost = json.loads(store.get(UNRESPONSIVE)) if store.check([UNRESPONSIVE]) else []
    if store.add(LEAVING, 1) + len(lost) >= member.size:
        store.set(ALL_LEAVE, "yes")
    _wait(store, member, ALL_LEAVE, LEAVE)


def _answer(
    store: Any, member: Rank, ended: threading.Event, terminated: Callable[[], bool], busy: threading.Event
) -> None:
    """Watch, also after the store has once not replied."""
    for _ in range(TRIES):
        with contextlib.suppress(RuntimeError):
            return _watch(store, member, ended, terminated, busy)
        if ended.wait(LOOK):
            return


def _watch(
    store: Any, member: Rank, ended: threading.Event, terminated: Callable[[], bool], busy: threading.Event
) -> None:
    """Ranks may wait for each other without end, one of them in the thread that saves: then this thread stops them."""
    roll, called = PrefixStore("roll", store), math.inf  # answers to a call, and when it was heard
    while not store.check([FAILED]):
        if terminated():
            store.set(CALLED, "yes")
        if math.isinf(called) and store.check([CALLED]):
            _here(roll, member)
            called = time.monotonic()
        # All ranks save together, and one that writes a large file may not answer until it has.
        late = time.monotonic() - called > ANSWER and not busy.is_set()
        if late and not _all_here(roll, member) and _verdict(store, roll, member):
            record_failure(store, member, RuntimeError("it was terminated, and not all answered"))
        elif ended.wait(LOOK):
            return
    _here(store, member)
    lost = unresponsive_ranks(store, member, ended)
    while not lost and not store.check([LEFT]):
        if ended.wait(LOOK):
            return
    if not ended.wait(STOP if lost else ANSWER):
        first = store.get(FAILED).decode()
        say_as(member.rank, _stops(member, first, lost, "it still waits"))
        if not lost:  # then it may be this one that the others have waited for: it shows where it is
            faulthandler.dump_traceback(file=2)
        os._exit(1)


def _ignore_sigterm() -> None:
    """SIGTERM is torchrun's, for all that are left after a failure; they end by themselves, and say why first."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _here(store: Any, member: Rank) -> None:
    if store.add(_is_here(member.rank), 1) == 1:  # once, whichever of its threads is first
        store.add(ANSWERS, 1)


def _is_here(rank: int) -> str:
    return f"rank {rank} is here"


def _all_here(store: Any, member: Rank) -> bool:
    return store.add(ANSWERS, 0) >= member.size


def _wait(store: Any, member: Rank, key: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not store.check([key]):
        time.sleep(_pause(member))


def _pause(member: Rank) -> float:
    """Seconds between looks, so that all ranks together ask one store for at most ten thousand things a second.

    (Two things each, in two threads.)
    """
    return max(0.05, 4 * member.size / 10_000)


def _stops(member: Rank, first: str, lost: Collection[int], reason: str) -> str:
    answer = "answers" if len(lost) == 1 else "answer"
    cause = f"{named_ranks(lost)} of {member.size} no longer {answer}" if lost else first
    return (
        f"{cause}: rank {member.rank} stops too ({reason}). The same command goes on from the last checkpoint, and "
        "torchrun --max-restarts N gives it by itself"
    )


def named_ranks(ranks: Collection[int]) -> str:
    """Such as `rank 3`, or `ranks 1, 3`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def _reason(error: BaseException) -> str:
    """The first line of what the error came from: a pipeline wraps those of its stages."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
