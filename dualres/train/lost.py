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

from dualres.progress import say_as
from dualres.train.errors import TrainError

# In the store. Of many thousand ranks each asks for counts, and one alone for names.
FAILED, LOST = "the first rank that failed, and why", "the ranks that did not answer"
CALLED, ANSWERS, COUNTS = "a rank was terminated", "how many have answered", "how many look who has not"
LEFT, LEAVING, ALL_LEAVE = "a rank has left after a failure", "how many leave", "all that are left leave"
# Seconds between looks whether a rank has failed; that all have to answer then; to stop when the lost are known; and
# that those who leave wait for each other.
# Together less than the 30 that torchrun leaves the others, from when the first process ended until it kills them.
LOOK, ANSWER, STOP, LEAVE = 2.0, 15.0, 5.0, 5.0
NEVER = threading.Event()


class Member(Protocol):
    """A rank of so many."""

    @property
    def rank(self) -> int:
        """Its number."""

    @property
    def size(self) -> int:
        """How many there are."""


@contextlib.contextmanager
def naming_lost_ranks(member: Member) -> Iterator[None]:
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
        _ignore_terminations()
        lost = lost_ranks(store, member)
        if not lost and first.startswith(f"rank {member.rank} "):
            raise
        raise TrainError(_stops(member, first, lost, _reason(error))) from error


def record_failure(store: Any, member: Member, error: Exception) -> str:
    """Write down why this rank fails, if it is the first. -> who was the first, and why"""
    own = f"rank {member.rank} of {member.size} has failed ({_reason(error)})"
    with contextlib.suppress(RuntimeError):  # the store may be gone
        _here(store, member)
        return store.compare_set(FAILED, "", own).decode()
    return own


def lost_ranks(store: Any, member: Member, ended: threading.Event = NEVER, patience: float | None = None) -> list[int]:
    """The ranks that did not answer in time after the first failure: what the first rank to know has written.

    Whoever waits for it has until this rank has `ended`.
    """
    end = time.monotonic() + (ANSWER if patience is None else patience)
    with contextlib.suppress(RuntimeError):  # without a store there is no one to ask
        while time.monotonic() < end and not store.check([LOST]) and not _all_here(store, member):
            if ended.wait(_pause(member)):
                return []
        if store.add(COUNTS, 1) > 1:
            _wait(store, member, LOST, STOP)  # the first that counts may itself be lost
        if not store.check([LOST]):
            everyone = () if _all_here(store, member) else range(member.size)
            silent = [rank for rank in everyone if not store.check([_is_here(rank)])]
            store.compare_set(LOST, "", json.dumps(silent))
        return json.loads(store.get(LOST))
    return []


@contextlib.contextmanager
def hearing_terminations() -> Iterator[Callable[[], bool]]:
    """SIGTERM does not end this process. -> whether it has come, for every thread, while the main one waits too"""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    came = threading.Event()

    def terminated() -> bool:
        with contextlib.suppress(OSError):  # nothing there, or closed
            while signals := reader.recv(64):
                if signal.SIGTERM in signals:
                    came.set()
        return came.is_set()

    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield terminated
        signal.signal(signal.SIGTERM, handler)  # after a failure it is ignored until the end
    finally:
        signal.set_wakeup_fd(descriptor)
        for end in (reader, writer):
            end.close()


@contextlib.contextmanager
def answering(member: Member, terminated: Callable[[], bool]) -> Iterator[None]:
    """A thread that answers for this rank when another fails, also while this one waits for that other."""
    store: Any = dist.distributed_c10d._get_default_store()
    ended = threading.Event()
    given = store.clone(), member, ended, terminated
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
                leave_together(store, member)


def leave_together(store: Any, member: Member) -> None:
    """Ignore SIGTERM, and wait until all others do: when the first process ends, torchrun terminates those that are
    left, and each has to say why it stops. Whoever is lost, or still waits for another, is not waited for long.
    """
    _ignore_terminations()
    lost = json.loads(store.get(LOST)) if store.check([LOST]) else []
    if store.add(LEAVING, 1) + len(lost) >= member.size:
        store.set(ALL_LEAVE, "yes")
    _wait(store, member, ALL_LEAVE, LEAVE)


def _answer(store: Any, member: Member, ended: threading.Event, terminated: Callable[[], bool]) -> None:
    """Ranks may wait for each other without end, one of them in the thread that saves: then this thread stops them."""
    with contextlib.suppress(RuntimeError):  # the store may go first
        patience, called = ANSWER, math.inf  # when the roll was called
        while not store.check([FAILED]):
            if terminated():
                store.set(CALLED, "yes")
            if math.isinf(called) and store.check([CALLED]):
                _here(store, member)
                called = time.monotonic()
            if time.monotonic() - called > ANSWER and not _all_here(store, member):
                record_failure(store, member, RuntimeError("it was terminated, and not all answered"))
                patience = 0.0
            elif ended.wait(LOOK):
                return
        _here(store, member)
        lost = lost_ranks(store, member, ended, patience)
        while not lost and not store.check([LEFT]):
            if ended.wait(LOOK):
                return
        if not ended.wait(STOP if lost else ANSWER):
            first = store.get(FAILED).decode()
            say_as(member.rank, _stops(member, first, lost, "it still waits"))
            if not lost:  # then it may be this one that the others have waited for: it shows where it is
                faulthandler.dump_traceback(file=2)
            os._exit(1)


def _ignore_terminations() -> None:
    """SIGTERM is torchrun's, for all that are left after a failure; they end by themselves, and say why first."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _here(store: Any, member: Member) -> None:
    if store.add(_is_here(member.rank), 1) == 1:  # once, whichever of its threads is first
        store.add(ANSWERS, 1)


def _is_here(rank: int) -> str:
    return f"rank {rank} is here"


def _all_here(store: Any, member: Member) -> bool:
    return store.add(ANSWERS, 0) >= member.size


def _wait(store: Any, member: Member, key: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not store.check([key]):
        time.sleep(_pause(member))


def _pause(member: Member) -> float:
    """Seconds between two questions, so that all ranks together ask one store for at most ten thousand a second."""
    return max(0.05, member.size / 10_000)


def _stops(member: Member, first: str, lost: Collection[int], reason: str) -> str:
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
