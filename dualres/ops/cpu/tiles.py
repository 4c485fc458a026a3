"""What kernels that take a tile of tokens at a time do with its rows, in buffers of their own."""
# D width

from typing import Any

from numba import types

from dualres.ops.cpu.compiler import compiled
from dualres.ops.cpu.lanes import put, read
from dualres.ops.cpu.loops import LANES
from dualres.ops.cpu.rows import pointer, size_of


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
