"""How Python calls the kernels: tensors as addresses, tokens split across threads.

A kernel is a compiled function of a range of tokens. Its inputs are a named tuple of numbers (addresses, sizes, ε), and
lists of integers, that Python packs once per call, so that no thread runs Python:

    class ScaleInputs(NamedTuple):
        rows: int  # address
        width: int
        factor: float

    @kernel(ScaleInputs)
    def _scale(first: int, last: int, sums: int, scratch: int, table: int, kind: Any) -> None:
        inputs = unpack(table, ScaleInputs)
        for t in range(first, last):
            for d in range(0, inputs.width, LANES):
                place, left = inputs.rows + (t * inputs.width + d) * size_of(kind), inputs.width - d
                write(place, kind, left, read(place, kind, left) * inputs.factor)

    _scale(ScaleInputs(x.data_ptr(), width, 2.0), tokens, x.dtype)

In compiled code a list is the address of its int64 numbers. numba has no bfloat16, so `kind` encodes a stream's dtype:
float32, uint16 for bfloat16, int16 for float16.

Each part of the tokens has memory of its own. At `scratch` are as many float32 numbers as the call asks for. At `sums`
is one float64 for every element of the tensors passed as `sums`, in their order and initially zero; the totals over all
parts are stored in these tensors. A kernel must not raise, so it must not allocate memory.

There are as many threads as PyTorch uses, each with its own contiguous range of tokens. On Linux they are PyTorch's own
threads, woken through its OpenMP library. Additional threads would compete with them for cores: after an operator,
PyTorch's threads keep spinning, waiting for the next one.
"""

import contextlib
import ctypes
import functools
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from torch import Tensor

from dualres.ops.cpu.compiler import compiled, intrinsic
from dualres.ops.cpu.pointers import LINE, pointer

MIN_TOKENS = 16  # per thread: with fewer, waking it costs more than its work
MEMORY, STEP, PARTS, SUMS = 2, 3, 5, 9  # places in a job: address of its memory, a part's bytes, parts, sums
KINDS: dict[torch.dtype, Any] = {
    torch.float32: types.float32,
    torch.bfloat16: types.uint16,
    torch.float16: types.int16,
}


def address_of(tensor: Tensor | None) -> int:
    """Its address; 0 without a tensor."""
    return 0 if tensor is None else tensor.data_ptr()


def parts(tokens: int) -> int:
    """The number of threads for `tokens` tokens."""
    return max(1, min(torch.get_num_threads(), tokens // MIN_TOKENS))


@intrinsic
def unpack(context: Any, table: Any, takes: Any) -> Any:
    """The inputs that were packed at an address: int64 and float64 numbers, and the address of each list of them."""
    declared = takes.instance_class.__annotations__.values()
    kinds = [types.float64 if kind is float else types.int64 for kind in declared]

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers = []
        for n, (kind, given) in enumerate(zip(kinds, declared, strict=True)):
            address = builder.add(arguments[0], ir.Constant(ir.IntType(64), 8 * n))
            number = builder.load(builder.inttoptr(address, context.get_value_type(kind).as_pointer()))
            numbers.append(builder.add(arguments[0], number) if given == list[int] else number)
        return context.make_tuple(builder, signature.return_type, numbers)

    return types.NamedTuple(kinds, takes.instance_class)(types.int64, takes), code


@intrinsic
def _call_kernel(context: Any, function: Any, first: Any, last: Any, sums: Any, scratch: Any, table: Any) -> Any:
    """Call the kernel at an address."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function, *numbers = arguments
        word, byte = ir.IntType(64), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [*[word] * 5, byte])
        builder.call(builder.inttoptr(function, kind.as_pointer()), [*numbers, cgutils.get_null_value(byte)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), code


@intrinsic
def _call_openmp(context: Any, function: Any) -> Any:
    """Call the function at an address, which takes nothing and returns a C int."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        number = builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [])
        return builder.sext(number, ir.IntType(64))

    return types.int64(types.int64), code


@compiled
def _run_part(job: int, part: int) -> None:
    """Run one part of a job, whose first numbers are packed in `Kernel.__call__`."""
    numbers = pointer(job, types.int64)
    function, table, memory, step = numbers[0], job + numbers[1], numbers[2], numbers[3]
    size, parts, tokens = numbers[4], numbers[5], numbers[6]
    own = memory + part * step
    sums = pointer(own, types.float64)
    for n in range(size):
        sums[n] = 0.0
    first, last = tokens * part // parts, tokens * (part + 1) // parts
    _call_kernel(function, first, last, own, own + _lines(8 * size), table)


@compiled
def _lines(size: int) -> int:
    """A number of bytes rounded up to whole cache lines."""
    return (size + LINE - 1) // LINE * LINE


@compiled
def _run_parts(job: int) -> None:
    """Run the parts of a job that are this OpenMP thread's."""
    numbers = pointer(job, types.int64)
    first, step = _call_openmp(numbers[7]), _call_openmp(numbers[8])
    for part in range(first, numbers[5], step):
        _run_part(job, part)


@compiled
def _add_parts(job: int) -> None:
    """Store the totals of the sums over all parts in their tensors."""
    numbers = pointer(job, types.int64)
    memory, step, parts, tensors = numbers[2], numbers[3], numbers[5], numbers[9]
    before = 0
    for tensor in range(tensors):
        into = pointer(numbers[10 + 2 * tensor], types.float32)
        size = numbers[11 + 2 * tensor]
        for n in range(size):
            total = 0.0
            for part in range(parts):
                total += pointer(memory + part * step, types.float64)[before + n]
            into[n] = total
        before += size


def _c_address(function: Any, *arguments: Any) -> int:
    """Compile a function for these argument types, or load it from the cache. -> its address as a C function"""
    function.compile(arguments)
    code = function.overloads[arguments]
    return code.library.get_pointer_to_function(code.fndesc.llvm_cfunc_wrapper_name)


@functools.cache
def _runners() -> tuple[Any, int, Any]:
    """`_run_part` and `_add_parts` as Python calls them, and the address of `_run_parts`, as OpenMP calls it."""
    word, job = types.int64, ctypes.c_void_p
    run_part = ctypes.CFUNCTYPE(None, job, ctypes.c_int64)(_c_address(_run_part, word, word))
    add_parts = ctypes.CFUNCTYPE(None, job)(_c_address(_add_parts, word))
    return run_part, _c_address(_run_parts, word), add_parts


class Kernel:
    """A compiled function of a range of tokens, called by all threads; the module's docstring says how to write one."""

    def __init__(self, function: Callable[..., None], takes: Any):
        declared = list(takes.__annotations__.values())
        self.function = compiled(function)
        self.format = "".join("d" if kind is float else "q" for kind in declared)
        self.lists = [n for n, kind in enumerate(declared) if kind == list[int]]
        self.addresses: dict[torch.dtype, int] = {}

    def __call__(
        self, inputs: Any, tokens: int, dtype: torch.dtype, scratch: int = 0, sums: Sequence[Tensor | None] = ()
    ) -> None:
        """Run or record it, for `tokens` tokens of streams in `dtype`; the totals of its sums are stored in `sums`."""
        count, openmp = parts(tokens), pytorch_threads()
        totals = [number for total in sums if total is not None for number in (total.data_ptr(), total.numel())]
        size = sum(totals[1::2])
        step = -(-8 * size // LINE) * LINE + -(-4 * scratch // LINE) * LINE
        numbers = (
            self.address(dtype),
            8 * (10 + len(totals)),  # bytes from here to the inputs
            _KEPT.of(count * step),
            step,
            size,
            count,
            tokens,
            *((0, 0) if openmp is None else openmp[1:]),
            len(totals) // 2,
            *totals,
        )
        packed, listed = list(inputs), []  # type: list[Any], list[int]
        for n in self.lists:
            packed[n] = 8 * (len(packed) + len(listed))  # bytes from the inputs to the list
            listed += inputs[n]
        job = _packer(len(numbers), self.format, len(listed))(*numbers, *packed, *listed)
        if _KEPT.jobs is None:
            _run(job, count, len(totals) > 0)
        else:
            _KEPT.jobs.append(np.frombuffer(job, np.int64))

    def address(self, dtype: torch.dtype) -> int:
        """Its address as a C function, compiled for streams in `dtype`."""
        if dtype not in self.addresses:
            self.addresses[dtype] = _c_address(self.function, *[types.int64] * 5, types.NumberClass(KINDS[dtype]))
        return self.addresses[dtype]


def _run(job: Any, count: int, has_sums: bool) -> None:
    """Run the parts of a job, which is bytes or an address."""
    (run_part, run_parts, add_parts), openmp = _runners(), pytorch_threads()
    if count == 1:
        run_part(job, 0)
    elif openmp is not None:
        openmp[0](run_parts, job, count, 0)
    else:
        pool = own_threads(os.getpid(), count)
        wait([pool.submit(run_part, job, part) for part in range(count)])
    if has_sums:
        add_parts(job)


def kernel(takes: Any) -> Callable[[Callable[..., None]], Kernel]:
    """A decorator for kernels; `takes` is the class of its inputs."""
    return lambda function: Kernel(function, takes)


@functools.cache
def _packer(before: int, inputs: str, after: int) -> Callable[..., bytes]:
    """Pack integers, inputs in a format of `struct`, and integers."""
    return struct.Struct(f"{before}q{inputs}{after}q").pack


class _Memory(threading.local):
    """Memory that a Python thread keeps from call to call."""

    size, address = 0, 0
    jobs: list[Any] | None = None  # of `recorded`

    def of(self, size: int) -> int:
        """The address of `size` bytes, from the start of a cache line."""
        if size > self.size:
            self.array, self.size = np.empty(size + LINE, np.uint8), size
            self.address = -(-self.array.ctypes.data // LINE) * LINE
        return self.address


_KEPT = _Memory()


@contextlib.contextmanager
def recorded() -> Iterator[list[Any]]:
    """Collect the jobs of the kernels that this Python thread calls, as arrays of int64, instead of running them."""
    _KEPT.jobs = []
    try:
        yield _KEPT.jobs
    finally:
        _KEPT.jobs = None


def run_job(words: Any) -> None:
    """Run a recorded job in this thread's memory."""
    step, count = int(words[STEP]), int(words[PARTS])
    words[MEMORY] = _KEPT.of(count * step)
    _run(words.ctypes.data, count, bool(words[SUMS]))


def run_here(job: int) -> None:
    """Run the only part of the job at an address."""
    _runners()[0](job, 0)


@functools.cache
def pytorch_threads() -> tuple[Any, int, int] | None:
    """From the OpenMP library that PyTorch has loaded, if it is GNU's, otherwise None.

    -> GOMP_parallel, and the addresses of omp_get_thread_num and omp_get_num_threads
    """
    try:
        library = ctypes.CDLL(None)
        library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        library.GOMP_parallel.restype = None
        numbers = (library.omp_get_thread_num, library.omp_get_num_threads)
    except (AttributeError, TypeError, OSError):  # another library, or no handle to the running program
        return None
    own, count = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in numbers)
    return library.GOMP_parallel, own, count


@functools.cache
def own_threads(process: int, count: int) -> ThreadPoolExecutor:
    """Threads that outlive a call, by process: a forked process inherits none."""
    return ThreadPoolExecutor(count, thread_name_prefix="dualres")
