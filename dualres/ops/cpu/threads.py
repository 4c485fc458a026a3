"""Tokens shared out over threads: as many as PyTorch uses, each with a run of tokens of its own.

On Linux they are PyTorch's own threads, woken through its OpenMP library. Threads beside them would compete with them
for the processors: after an operator of PyTorch, its threads keep spinning for the next one.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

FEWEST_TOKENS = 16  # for one thread: with fewer, waking it costs more than its work
Work = Callable[[int, int, int], object]
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def parts(tokens: int) -> int:
    """How many threads share `tokens` tokens."""
    return max(1, min(torch.get_num_threads(), tokens // FEWEST_TOKENS))


def share(work: Work, tokens: int) -> None:
    """Run work(part, first, last) for every part of the tokens, at the same time."""
    count = parts(tokens)
    if count == 1:
        work(0, 0, tokens)
        return
    ends = [tokens * part // count for part in range(count + 1)]
    openmp = pytorch_threads()
    if openmp is None:
        pool = own_threads(os.getpid(), count)
        tasks = [pool.submit(work, part, ends[part], ends[part + 1]) for part in range(count)]
        wait(tasks)  # all of them, also if one fails: until then they write to memory that a failure may free
        for task in tasks:
            task.result()
        return
    failures: list[BaseException] = []

    def run(_: object) -> None:
        try:
            for part in range(openmp.omp_get_thread_num(), count, openmp.omp_get_num_threads()):
                work(part, ends[part], ends[part + 1])
        except BaseException as failure:  # no exception may leave a foreign thread
            failures.append(failure)

    openmp.GOMP_parallel(CALLBACK(run), None, count, 0)
    if failures:
        raise failures[0]


@functools.cache
def pytorch_threads() -> Any:
    """The OpenMP library that PyTorch has loaded, if it is GNU's; None elsewhere."""
    try:
        library = ctypes.CDLL(None)
        library.GOMP_parallel.argtypes = [CALLBACK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        library.GOMP_parallel.restype = None
    except (AttributeError, TypeError, OSError):  # another library, or a system where a program has no handle
        return None
    return library


@functools.cache
def own_threads(process: int, count: int) -> ThreadPoolExecutor:
    """Threads that outlive a call; a forked process, which inherits none, has its own."""
    return ThreadPoolExecutor(count, thread_name_prefix="dualres")
