"""How Python calls the kernels: tensors as addresses and arrays, tokens split across threads.

numba has no bfloat16, so a stream is passed as an address and an empty array whose dtype encodes the stream's: float32,
uint16 for bfloat16, int16 for float16.

There are as many threads as PyTorch uses, each with its own contiguous range of tokens. On Linux they are PyTorch's own
threads, woken through its OpenMP library. Additional threads would compete with them for cores: after an operator,
PyTorch's threads keep spinning, waiting for the next one.
"""

import ctypes
import functools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

MIN_TOKENS = 16  # per thread: with fewer, waking it costs more than its work
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
LIKE = {
    torch.float32: np.empty(0, np.float32),
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float16: np.empty(0, np.int16),
}
Array = np.ndarray[Any, Any]
ABSENT = {axes: np.empty((0,) * axes, np.float32) for axes in (1, 2, 3)}  # in place of a tensor, by its axes


def addresses(tensors: Sequence[Tensor]) -> Array:
    """The address of each tensor. n × … -> (n,)"""
    return np.array([tensor.data_ptr() for tensor in tensors], np.int64)


def stream_addresses(tensors: Sequence[Tensor]) -> Array:
    """The address of each stream of each tensor. n × (J,B,T,D) -> (n,J)"""
    first = tensors[0]
    step, streams = first.stride(0) * first.element_size(), range(len(first))
    return np.array([[begin + step * j for j in streams] for begin in map(Tensor.data_ptr, tensors)], np.int64)


def array(tensor: Tensor | None, axes: int = 1) -> Array:
    """A contiguous float32 tensor as an array, which must not outlive it; without a tensor an empty array of `axes`.

    `Tensor.numpy` would make its storage permanently non-resizable, and FSDP2 frees a parameter by resizing.
    """
    return ABSENT[axes] if tensor is None else _floats(tensor.data_ptr(), tensor.shape)


def tokenwise(tensor: Tensor | None, leading_axes: int) -> Array:
    """`array` with the token axes, which follow `leading_axes` others, flattened. (…,B,T) -> (…,N)"""
    if tensor is None:
        return ABSENT[leading_axes + 1]
    shape = tensor.shape
    return _floats(tensor.data_ptr(), (*shape[:leading_axes], math.prod(shape[leading_axes:])))


@functools.lru_cache(maxsize=4096)
def _floats(address: int, shape: tuple[int, ...]) -> Array:
    """The memory at an address as an array that does not own it."""
    if math.prod(shape) == 0:
        return np.empty(shape, np.float32)
    interface = {"data": (address, False), "shape": tuple(shape), "typestr": "<f4", "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def parts(tokens: int) -> int:
    """The number of threads for `tokens` tokens."""
    return max(1, min(torch.get_num_threads(), tokens // MIN_TOKENS))


def parallel_for(work: Callable[[int, int, int], object], tokens: int) -> None:
    """Run work(part, first, last) for every part of the tokens, in parallel."""
    count = parts(tokens)
    if count == 1:
        work(0, 0, tokens)
        return
    ends = [tokens * part // count for part in range(count + 1)]
    openmp = pytorch_threads()
    if openmp is None:
        pool = own_threads(os.getpid(), count)
        tasks = [pool.submit(work, part, ends[part], ends[part + 1]) for part in range(count)]
        wait(tasks)  # for all, even if one fails: until then they write to memory that a failure may free
        for task in tasks:
            task.result()
        return
    failures: list[BaseException] = []

    def run(_: object) -> None:
        try:
            for part in range(openmp.omp_get_thread_num(), count, openmp.omp_get_num_threads()):
                work(part, ends[part], ends[part + 1])
        except BaseException as failure:  # an exception must not escape into an OpenMP thread
            failures.append(failure)

    openmp.GOMP_parallel(CALLBACK(run), None, count, 0)
    if failures:
        raise failures[0]


def parallel_sums(
    work: Callable[[int, int, list[Tensor | None]], object], tokens: int, sums: Sequence[Tensor | None]
) -> None:
    """`parallel_for` of work(first, last, own), which adds to its `own` zeros; their total over the parts is `sums`."""
    count = parts(tokens)
    if count == 1:
        work(0, tokens, [None if total is None else total.zero_() for total in sums])
        return
    partial = [None if total is None else total.new_zeros(count, *total.shape) for total in sums]
    parallel_for(
        lambda part, first, last: work(first, last, [None if own is None else own[part] for own in partial]), tokens
    )
    for total, own in zip(sums, partial, strict=True):
        if total is not None and own is not None:
            torch.sum(own, 0, out=total)


@functools.cache
def pytorch_threads() -> Any:
    """The OpenMP library that PyTorch has loaded if it is GNU's, otherwise None."""
    try:
        library = ctypes.CDLL(None)
        library.GOMP_parallel.argtypes = [CALLBACK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        library.GOMP_parallel.restype = None
    except (AttributeError, TypeError, OSError):  # another library, or no handle to the running program
        return None
    return library


@functools.cache
def own_threads(process: int, count: int) -> ThreadPoolExecutor:
    """Threads that outlive a call, by process: a forked process inherits none."""
    return ThreadPoolExecutor(count, thread_name_prefix="dualres")
