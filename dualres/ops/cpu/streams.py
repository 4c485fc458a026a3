"""Streams in compiled loops: rows found by address, asked of memory in advance, widened to float32 and rounded back.

numba knows no bfloat16, so a stream arrives as an address and a `like` that says what its bits mean: float32, uint16
for bfloat16, int16 for float16.
"""
# D width

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic, overload
from torch import Tensor

from dualres.ops.cpu import cache

kept = cache.folder()
if kept is not None:
    cache.forget_stale(kept)
# Sums may be reordered, which is what makes them vector instructions; NaN and infinity keep their meaning.
OPTIONS: dict[str, Any] = {
    "nogil": True,
    "cache": kept is not None,
    "fastmath": {"reassoc", "nsz", "contract", "arcp"},
    "error_model": "numpy",
}
LIKE = {
    torch.float32: np.empty(0, np.float32),
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float16: np.empty(0, np.int16),
}


def begins(tensors: Sequence[Tensor]) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Where each tensor begins. n × … -> (n,)"""
    return np.array([tensor.data_ptr() for tensor in tensors], np.int64)


def streams_of(tensors: Sequence[Tensor]) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Where each stream of each tensor begins. n × (J,B,T,D) -> (n,J)"""
    first = tensors[0]
    step, streams = first.stride(0) * first.element_size(), range(len(first))
    return np.array([[begin + step * j for j in streams] for begin in map(Tensor.data_ptr, tensors)], np.int64)


class Seen:
    """Floats at an address, as numpy finds them."""

    def __init__(self, address: int, shape: tuple[int, ...]):
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": "<f4", "version": 3}


@functools.lru_cache(maxsize=4096)
def floats(address: int, shape: tuple[int, ...]) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """What is at an address, as an array, which knows nothing of the tensor there and does not keep it."""
    return np.asarray(Seen(address, tuple(shape))) if math.prod(shape) else np.empty(tuple(shape), np.float32)


def array(tensor: Tensor) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """A contiguous float32 tensor, which must outlive it, as an array.

    `Tensor.numpy` would make its storage unresizable for ever, and FSDP2 frees a parameter by resizing.
    """
    return floats(tensor.data_ptr(), tensor.shape)


def tokenwise(tensor: Tensor, others: int) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """`array`, of one number per token, whose axes come after so many others. (…,B,T) -> (…,N)"""
    shape = tensor.shape
    return floats(tensor.data_ptr(), (*shape[:others], math.prod(shape[others:])))


@intrinsic
def pointer(context: Any, address: Any, like: Any) -> Any:
    """The address as a pointer to what `like` holds."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), code


@njit(**OPTIONS)
def row_of(address: int, token: int, width: int, like: Any) -> Any:
    """Row `token` of the stream at `address`. -> (D,)"""
    return carray(pointer(address + token * width * like.itemsize, like), (width,))  # type: ignore[call-arg]


@intrinsic
def prefetch(context: Any, address: Any) -> Any:
    """Ask memory for a line that will be read."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        numbers = [ir.Constant(word, n) for n in (0, 3, 1)]  # to read, into the nearest cache, data
        builder.call(function, [builder.inttoptr(arguments[0], byte), *numbers])
        return context.get_dummy_value()

    return types.void(types.int64), code


LINE = 64  # bytes that memory delivers at a time


@njit(**OPTIONS)
def expect(address: int, token: int, width: int, like: Any, part: int, parts: int) -> None:
    """Ask memory for a part of a row that comes soon: a row is too short for the processor to see the stream by itself.

    Asked for all at once, the lines queue up and what is computed meanwhile waits behind them.
    """
    size = width * like.itemsize
    begin = address + token * size
    for line in range(size * part // parts // LINE * LINE, size * (part + 1) // parts, LINE):
        prefetch(begin + line)  # type: ignore[call-arg]


def _convert(source: Any, result: Any, code: Callable[..., Any]) -> Any:
    @intrinsic
    def conversion(context: Any, bits: Any) -> Any:
        return result(source), lambda context, builder, signature, arguments: code(builder, arguments[0])

    return conversion


def _round_to_bfloat16(builder: Any, number: Any) -> Any:
    """To the nearest, ties to even; a NaN stays one."""
    bits = builder.bitcast(number, ir.IntType(32))
    word = lambda n: ir.Constant(ir.IntType(32), n)  # noqa: E731
    odd = builder.and_(builder.lshr(bits, word(16)), word(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, word(0x7FFF))), word(16))
    chosen = builder.select(builder.fcmp_unordered("uno", number, number), word(0x7FC0), rounded)
    return builder.trunc(chosen, ir.IntType(16))


def _from_bfloat16(builder: Any, bits: Any) -> Any:
    word = builder.shl(builder.zext(bits, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
    return builder.bitcast(word, ir.FloatType())


def _from_float16(builder: Any, bits: Any) -> Any:
    return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())


def _round_to_float16(builder: Any, number: Any) -> Any:
    return builder.bitcast(builder.fptrunc(number, ir.HalfType()), ir.IntType(16))


from_bfloat16 = _convert(types.uint16, types.float32, _from_bfloat16)
to_bfloat16 = _convert(types.float32, types.uint16, _round_to_bfloat16)
from_float16 = _convert(types.int16, types.float32, _from_float16)
to_float16 = _convert(types.float32, types.int16, _round_to_float16)


def number(bits: Any) -> Any:
    """One element of a stream in float32."""
    raise NotImplementedError("compiled code only")


@overload(number)
def _(bits: Any) -> Any:
    if bits == types.float32:

        def same(bits: Any) -> Any:
            return bits

        return same
    convert = {types.uint16: from_bfloat16, types.int16: from_float16}[bits]

    def widen(bits: Any) -> Any:
        return convert(bits)

    return widen


def rounded(x: Any, stream: Any) -> Any:
    """A float32 number as an element of `stream`."""
    raise NotImplementedError("compiled code only")


@overload(rounded)
def _(x: Any, stream: Any) -> Any:
    if stream.dtype == types.float32:

        def same(x: Any, stream: Any) -> Any:
            return x

        return same
    convert = {types.uint16: to_bfloat16, types.int16: to_float16}[stream.dtype]

    def narrow(x: Any, stream: Any) -> Any:
        return convert(x)

    return narrow


@njit(**OPTIONS)
def load(into: Any, row: Any) -> None:
    """Widen a row of a stream. (D,), (D,)"""
    for d in range(len(into)):
        into[d] = number(row[d])


@njit(**OPTIONS)
def store(into: Any, row: Any) -> None:
    """Round a float32 row into a stream. (D,), (D,)"""
    for d in range(len(row)):
        into[d] = rounded(row[d], into)


def target(row: Any, space: Any) -> Any:
    """Where to compute a result for `row`: there, if it is float32, or else in `space`. Then comes `finish`."""
    raise NotImplementedError("compiled code only")


@overload(target)
def _(row: Any, space: Any) -> Any:
    if row.dtype == types.float32:

        def direct(row: Any, space: Any) -> Any:
            return row

        return direct

    def aside(row: Any, space: Any) -> Any:
        return space

    return aside


def finish(row: Any, result: Any) -> None:
    """Store a result that was computed in `target`."""
    raise NotImplementedError("compiled code only")


@overload(finish)
def _(row: Any, result: Any) -> Any:
    if row.dtype == types.float32:

        def nothing(row: Any, result: Any) -> None:
            pass

        return nothing

    def narrow(row: Any, result: Any) -> None:
        store(row, result)

    return narrow
