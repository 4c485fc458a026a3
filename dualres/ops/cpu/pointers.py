"""Access to memory in compiled code: by address, with prefetch."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from dualres.ops.cpu.compiler import compiled, intrinsic

LINE = 64  # bytes of a cache line


@intrinsic
def pointer(context: Any, address: Any, like: Any) -> Any:
    """The address as a pointer to elements of the type of `like`."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), code


@intrinsic
def size_of(context: Any, kind: Any) -> Any:
    """The bytes of an element of a type."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(ir.IntType(64), kind.dtype.bitwidth // 8)

    return types.int64(kind), code


@compiled
def integers(address: int) -> Any:
    """A pointer to int64 numbers: a list among a kernel's inputs."""
    return pointer(address, types.int64)


def _prefetching(to_write: int, text: str) -> Any:
    def prefetch(context: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
            numbers = [ir.Constant(word, n) for n in (to_write, 3, 1)]  # into the nearest cache, data
            builder.call(function, [builder.inttoptr(arguments[0], byte), *numbers])
            return context.get_dummy_value()

        return types.void(types.int64), code

    prefetch.__doc__ = text
    return intrinsic(prefetch)


prefetch = _prefetching(0, "Prefetch a cache line.")
prefetch_to_write = _prefetching(1, "Prefetch a cache line that will be written.")
