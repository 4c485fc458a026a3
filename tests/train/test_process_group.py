"""How the ranks of a start find each other, and what each says when one is lost: threads instead of processes."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.distributed_c10d import PrefixStore

from dualres.train import failure_detection
from dualres.train.failure_detection import (
    NEVER,
    catch_sigterm,
    record_failure,
    report_failed_ranks,
    respond_to_failures,
    unresponsive_ranks,
)
from dualres.train.process_group import STARTUP_TIMEOUT, World, _picklable, agree_on_job_id, set_timeout
from dualres.util.errors import TrainError

SIZE, SOON = 4, timedelta(seconds=60)
GLOO: Any = object()  # a group that is never used


def rank_of(rank: int) -> World:
    return World(rank, SIZE, torch.device("cpu"), GLOO, GLOO)


def start(store: Store, order: list[int], pause: float = 0.0) -> list[str]:
    """The names that ranks have for a start, which come in this order."""
    with ThreadPoolExecutor(SIZE) as pool:
        names = []
        for rank in order:
            names.append(pool.submit(agree_on_job_id, store, rank, SIZE, SOON))
            time.sleep(pause)
        return [name.result() for name in names]


@pytest.mark.parametrize(
    "order",
    [
        pytest.param([0, 1, 2, 3], id="rank 0 first, and finds what the dead have asked"),
        pytest.param([3, 2, 1, 0], id="rank 0 last, and the others find what the dead have answered"),
    ],
)
def test_a_start_has_one_name_of_its_own(order: list[int]):
    store = HashStore()
    names = [start(store, order, pause) for pause in (0.0, 0.2, 0.0)]
    assert [len(set(of_start)) for of_start in names] == [1, 1, 1]
    assert len({of_start[0] for of_start in names}) == 3


def test_a_start_after_one_that_never_was_complete():
    store = HashStore()
    for rank in (0, 2):  # asked or answered, and killed
        with pytest.raises(TrainError):
            agree_on_job_id(store, rank, SIZE, timedelta(seconds=0.1))
    assert len(set(start(store, [0, 1, 2, 3], 0.1))) == 1


@pytest.mark.slow
def test_ranks_that_do_not_come_are_named():
    store, limit = HashStore(), timedelta(seconds=3)
    with pytest.raises(TrainError, match=r"^rank 0 of 4 did not join within 0\.05 minutes"):
        agree_on_job_id(store, 1, SIZE, limit)
    with ThreadPoolExecutor() as pool:
        pool.submit(agree_on_job_id, store, 2, SIZE, SOON)
        store.wait(["rank 2 asks"], SOON)
        with pytest.raises(TrainError, match=r"^ranks 1, 3 of 4 did not join within 0\.05 minutes"):
            agree_on_job_id(store, 0, SIZE, limit)


@pytest.mark.slow
def test_one_verdict_at_one_time(monkeypatch: pytest.MonkeyPatch):
    """Rank 0 notices first; rank 1 when half of the time is over, 2 after it; 3 is lost."""
    monkeypatch.setattr(failure_detection, "POLL_INTERVAL", 0.1)
    monkeypatch.setattr(failure_detection, "RESPONSE_TIME", 12.0)
    monkeypatch.setattr(failure_detection, "STOP_TIME", 600.0)
    store, ended = HashStore(), threading.Event()
    began, took = time.monotonic(), {}

    def notice(rank: int, delay: float) -> list[int]:
        time.sleep(delay)
        record_failure(store, rank_of(rank), RuntimeError("connection closed"))
        found = unresponsive_ranks(store, rank_of(rank))
        took[rank] = time.monotonic() - began
        return found

    with ThreadPoolExecutor(SIZE) as pool:
        answering = pool.submit(respond_to_failures, store, rank_of(2), ended)
        noticed = [pool.submit(notice, rank, delay) for rank, delay in enumerate((0.0, 6.0, 12.2))]
        try:
            verdicts = [one.result() for one in noticed]
        finally:
            ended.set()
        answering.result()
    assert verdicts == [[3], [3], [3]]
    assert all(seconds < 17 for seconds in took.values()), took  # rank 1 by itself would take 18


class Asked:
    """A store that counts what it is asked."""

    def __init__(self, store: Store):
        self.store, self.questions = store, 0

    def __getattr__(self, name: str) -> Any:
        self.questions += 1
        return getattr(self.store, name)


@pytest.mark.slow
def test_thousands_of_ranks_ask_the_store_little(monkeypatch: pytest.MonkeyPatch):
    """Who is lost is looked up by one of them, in one list of keys."""
    monkeypatch.setattr(failure_detection, "RESPONSE_TIME", 1.0)
    many = [rank_of(rank)._replace(size=5000) for rank in range(5000)]
    store, gone = HashStore(), 4321
    for member in many:
        if member.rank != gone:
            failure_detection._respond(store, member)
    asked = [Asked(store) for _ in range(3)]
    with ThreadPoolExecutor() as pool:
        verdicts = list(pool.map(lambda one, member: unresponsive_ranks(one, member), asked, many))
    assert verdicts == [[gone]] * 3
    assert all(one.questions < 60 for one in asked), [one.questions for one in asked]


def test_a_rank_that_waits_for_ever_speaks_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(failure_detection, "STOP_TIME", 0.1)
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    store = HashStore()
    store.set(failure_detection.FAILED, "rank 1 of 4 has failed (connection closed)")
    store.set(failure_detection.UNRESPONSIVE, "[3]")
    respond_to_failures(store, rank_of(2), threading.Event())
    assert codes == [1]
    assert capsys.readouterr().err.startswith("dualres, rank 2: rank 3 of 4 no longer responds: rank 2 stops too (")


def test_where_all_are_there_the_failed_one_may_finish_its_save(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(failure_detection, "POLL_INTERVAL", 0.05)
    monkeypatch.setattr(failure_detection, "RESPONSE_TIME", 0.2)
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    store, ended = HashStore(), threading.Event()
    store.set(failure_detection.FAILED, "rank 1 of 4 has failed (out of memory)")
    for rank in range(SIZE):
        failure_detection._respond(store, rank_of(rank))
    with ThreadPoolExecutor(2) as pool:
        waiting, leaving = (pool.submit(respond_to_failures, store, rank_of(2), event) for event in (NEVER, ended))
        time.sleep(1)
        assert codes == []
        ended.set()
        leaving.result(60)
        assert codes == []
        store.add(failure_detection.LEAVING, 1)
        waiting.result(60)
    assert codes == [1]
    assert capsys.readouterr().err.startswith("dualres, rank 2: rank 1 of 4 has failed (out of memory): rank 2 stops")


@pytest.mark.parametrize(
    ("others", "saving", "words"),
    [
        pytest.param([0, 1, 3], False, "", id="all answer: someone wants to stop", marks=pytest.mark.slow),
        pytest.param(
            [0, 1], True, "", id="one writes a large file, and does not come to answer", marks=pytest.mark.slow
        ),
        pytest.param([0, 1], False, "dualres, rank 2: rank 3 of 4 no longer responds: rank 2 stops too (", id="lost"),
    ],
)
def test_a_terminated_rank_calls_the_roll(
    others: list[int], saving: bool, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name, seconds in (("POLL_INTERVAL", 0.1), ("RESPONSE_TIME", 3.0), ("STOP_TIME", 0.1)):
        monkeypatch.setattr(failure_detection, name, seconds)
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    store, ended, busy = HashStore(), threading.Event(), threading.Event()
    if saving:
        busy.set()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(respond_to_failures, store, rank_of(2)._replace(terminated=lambda: True, busy=busy), ended)
        store.wait([failure_detection.CALLED], SOON)
        for rank in others:
            failure_detection._respond(PrefixStore("roll", store), rank_of(rank))
        if words:
            answer.result(60)
        else:
            time.sleep(5)
            assert not store.check([failure_detection.FAILED])
            assert not store.check([failure_detection.UNRESPONSIVE])
        ended.set()
    assert codes == ([1] if words else [])
    assert capsys.readouterr().err.startswith(words)


def test_an_answer_to_the_roll_is_none_to_a_failure(monkeypatch: pytest.MonkeyPatch):
    """A rank that is lost after someone wanted to stop is named all the same."""
    monkeypatch.setattr(failure_detection, "POLL_INTERVAL", 0.1)
    monkeypatch.setattr(failure_detection, "RESPONSE_TIME", 2.0)
    store, ended = HashStore(), threading.Event()
    for rank in (0, 1, 3):
        failure_detection._respond(PrefixStore("roll", store), rank_of(rank))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(respond_to_failures, store, rank_of(2)._replace(terminated=lambda: True), ended)
        store.wait([failure_detection.CALLED], SOON)
        for rank in (0, 1):
            record_failure(store, rank_of(rank), RuntimeError("connection closed"))
        assert unresponsive_ranks(store, rank_of(0)) == [3]
        ended.set()
        answer.result(60)


@pytest.mark.slow
def test_a_store_that_once_did_not_reply_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(failure_detection, "POLL_INTERVAL", 0.1)
    ended, silence = threading.Event(), iter([True, True])

    class Silent(HashStore):
        def check(self, keys: list[str]) -> bool:
            if next(silence, False):
                raise RuntimeError("timed out")
            return super().check(keys)

    store = Silent()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(respond_to_failures, store, rank_of(2), ended)
        record_failure(store, rank_of(1), ValueError("a bad value"))
        store.wait([failure_detection._response_key(2)], SOON)
        ended.set()
        answer.result(60)


def test_a_signal_is_heard_while_the_main_thread_waits():
    before = signal.getsignal(signal.SIGTERM)
    with catch_sigterm() as terminated:
        assert not terminated()
        os.kill(os.getpid(), signal.SIGTERM)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(terminated).result(60)
        assert terminated()
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch was built without gloo")
def test_saving_may_wait_for_a_slow_disk():
    """A group that has waited too long is broken for good, and with it all later checkpoints."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=STARTUP_TIMEOUT)
    try:
        control, saving = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
        groups: list[Any] = [dist.group.WORLD, control, saving]
        limits = []
        for seconds in (7.0, 7000.0):
            set_timeout(World(0, 1, torch.device("cpu"), control, saving), seconds)
            limits.append([group._get_backend(torch.device("cpu")).options._timeout for group in groups])
    finally:
        dist.destroy_process_group()
    short, long = timedelta(seconds=7), timedelta(seconds=7000)
    assert limits == [[short, short, STARTUP_TIMEOUT], [long, long, long]]


def test_an_error_that_cannot_be_sent_keeps_its_words(tmp_path: Path):
    with (tmp_path / "open").open("w") as file:
        sent = _picklable(ValueError("the reason", file))
    assert isinstance(sent, RuntimeError)
    assert "the reason" in str(sent)
    same = _picklable(TrainError("the loss is nan"))
    assert isinstance(same, TrainError)
    assert str(same) == "the loss is nan"


def failing(rank: int, error: Exception, store: Store, monkeypatch: pytest.MonkeyPatch) -> BaseException:
    """What becomes of an error of a rank."""
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    kind = RuntimeError if isinstance(error, RuntimeError) else type(error)
    with pytest.raises(kind) as caught, report_failed_ranks(rank_of(rank)):
        raise error
    return caught.value


def with_cause() -> RuntimeError:
    error = RuntimeError("[Stage 1] failed to run forward:")
    error.__cause__ = MemoryError("out of memory\nof 80 GiB")
    return error


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: TrainError("the loss is nan"), "the loss is nan"),
        (lambda: ValueError("a bad value"), "a bad value"),
        (lambda: OSError(5, "input/output error"), "[Errno 5] input/output error"),
        (MemoryError, "MemoryError"),
        (with_cause, "out of memory"),
    ],
    ids=["TrainError", "ValueError", "OSError", "no words", "wrapped by a pipeline"],
)
def test_an_error_of_one_stays_and_the_others_give_it(
    make: Callable[[], Exception], reason: str, monkeypatch: pytest.MonkeyPatch
):
    store, error = HashStore(), make()
    for rank in (0, 1, 3):  # they answer
        failure_detection._respond(store, rank_of(rank))
    assert failing(2, error, store, monkeypatch) is error
    other = failing(1, RuntimeError("connection closed"), store, monkeypatch)
    assert isinstance(other, TrainError)
    assert str(other).startswith(f"rank 2 of 4 has failed ({reason}): rank 1 stops too (connection closed). ")


def test_errors_that_all_have_wait_for_no_one(monkeypatch: pytest.MonkeyPatch):
    store, began = HashStore(), time.monotonic()
    for rank in range(SIZE):
        error = TrainError("the loss is nan")
        assert failing(rank, error, store, monkeypatch) is error
    assert time.monotonic() - began < failure_detection.RESPONSE_TIME / 2
    assert not store.check([failure_detection.UNRESPONSIVE])


@pytest.mark.parametrize(
    ("patience", "verdict", "late"),
    [
        pytest.param(60.0, [], [2, 3], id="all come"),
        pytest.param(60.0, [3], [2], id="one is lost"),
        pytest.param(3.0, [], [2], id="one does not come", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_fail_leave_together(
    patience: float, verdict: list[int], late: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(failure_detection, "EXIT_TIME", patience)
    store, began = HashStore(), time.monotonic()
    store.set(failure_detection.UNRESPONSIVE, str(verdict))
    with ThreadPoolExecutor(SIZE) as pool:
        first = [pool.submit(failure_detection.exit_together, store, rank_of(rank)) for rank in (0, 1)]
        time.sleep(1)
        assert patience < 60 or not any(one.done() for one in first)
        for rank in late:
            pool.submit(failure_detection.exit_together, store, rank_of(rank))
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("here", "words"),
    [([0, 2], "rank 3 of 4 no longer responds: "), ([2], "ranks 0, 3 of 4 no longer respond: ")],
    ids=["one", "two"],
)
def test_unresponsive_ranks_are_named(here: list[int], words: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(failure_detection, "RESPONSE_TIME", 0.2)
    store = HashStore()
    for rank in here:
        failure_detection._respond(store, rank_of(rank))
    error = failing(1, RuntimeError("connection closed"), store, monkeypatch)
    assert isinstance(error, TrainError)
    assert str(error).startswith(f"{words}rank 1 stops too (connection closed). ")
