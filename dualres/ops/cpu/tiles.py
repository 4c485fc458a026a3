"""What kernels that take a tile of tokens at a time do with its rows: in streams, and in buffers of their own."""
# N tokens  D width  J streams  K updates

from typing import Any

from numba import types

from dualres.ops.cpu.compiler import compiled
from dualres.ops.cpu.lanes import LANES, put, read
from dualres.ops.cpu.pointers import pointer, prefetch, size_of

SQUARE = LANES * LANES  # numbers: a vector for each token of a tile
FLUSH = 64  # tokens, rounded up to whole tiles, whose gradients are summed in float32
AHEAD = 3072  # bytes from a vector to one that is prefetched


@compiled
def stream_at(address: int, j: int, token: int, inputs: Any, kind: Any) -> int:
    """The address of a token's row of stream j. (J,N,D)"""
    return address + (j * inputs.tokens + token) * inputs.width * size_of(kind)


@compiled
def coefficient_at(address: int, k: int, j: int, token: int, inputs: Any) -> int:
    """The address of C_k^j of a token, in coefficients or their gradients. (K,J,N)"""
    return address + 4 * ((k * inputs.streams + j) * inputs.tokens + token)


@compiled
def read_ahead(address: int, kind: Any, left: int) -> Any:
    """`read`, and prefetch what follows in the stream: hardware does not keep up with short rows of many streams."""
    prefetch(address + AHEAD)
    return read(address, kind, left)


@compiled
def copy_rows(buffer: int, into: int, rows: int, count: int, width: int, stride: int, kind: Any) -> None:
    """Copy rows of a stream to an index of a buffer, where they are filled up with zeros."""
    size = size_of(kind)
    for row in range(count):
        for d in range(0, stride, LANES):
            put(buffer, into + row * stride + d, read(rows + (row * width + d) * size, kind, width - d))


@compiled
def add_to_sums(into: int, buffer: int, count: int) -> None:
    """Add the numbers of a buffer to float64 sums."""
    found, all_tiles = pointer(buffer, types.float32), pointer(into, types.float64)
    for n in range(count):
        all_tiles[n] += found[n]
