"""Kernel launches: tiles, grid and arguments."""
# mypy: disable-error-code="import-untyped"

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# The interpreter has a cost per program and operation, so its tiles hold many tokens; on a GPU a tile holds one.
INTERPRETED: bool = triton.knobs.runtime.interpret
TOKENS = 64 if INTERPRETED else 1
RESIDENT_WARPS = 8 if INTERPRETED else 2048  # about what a large GPU keeps in flight
MAX_WARPS = 16  # also the maximum of a workgroup of 64-lane AMD waves
LANES = 128  # tokens per program of the kernels on token-wise numbers
VECTOR = 8  # elements of a row per thread: 16 bytes of bfloat16


class Shape(NamedTuple):
    """The sizes that a kernel is compiled for."""

    D: int  # width of a row
    TOKENS: int  # of a tile
    WIDTH: int  # columns of a tile
    STREAMS: int = 1  # of a state, or live
    VALUES: int = 0  # of all gates of mHC
    PADDED: int = 0  # values or streams of mHC, padded to a power of two
    PRECISION: str = ""  # of the matrix products of mHC


class Tiling(NamedTuple):
    """How the programs of a kernel partition the tokens and the width."""

    grid: tuple[int, ...]
    warps: int
    shape: Shape
    chunk: int = 0  # tokens per program of a kernel that reduces over the tokens

    def by_columns(self, tokens: int) -> "Tiling":
        """The same tiles for a kernel that reduces over the tokens: its programs iterate over chunks of columns.

        The chunks depend only on the shape, so every run sums in the same order; their sums take a few MB at any
        length.
        """
        step, tiles = self.shape.TOKENS, triton.cdiv(self.shape.D, self.shape.WIDTH)
        parts = triton.cdiv(RESIDENT_WARPS, tiles * self.warps)
        chunk = max(1, triton.cdiv(tokens, parts * step)) * step
        return self._replace(grid=(tiles, triton.cdiv(tokens, chunk)), chunk=chunk)


def rows(tokens: int, width: int, sums: int = 1, streams: int = 1) -> Tiling:
    """Tiles of whole rows, with one vector of the row per thread, and more warps if a program keeps many `sums` of
    rows."""
    padded = triton.next_power_of_2(width)
    warps = max(1, padded // (32 * VECTOR), triton.next_power_of_2(sums) * padded // (32 * 64))
    return Tiling((triton.cdiv(tokens, TOKENS),), min(MAX_WARPS, warps), Shape(width, TOKENS, padded, streams))


def columns(tokens: int, width: int, sums: int, streams: int) -> Tiling:
    """Tiles of columns that keep `sums` accumulators over the tokens."""
    vector = max(1, min(VECTOR, 64 // triton.next_power_of_2(sums)))
    warps = max(count for count in (1, 2, 4) if count == 1 or 32 * vector * count <= width)
    return Tiling((), warps, Shape(width, TOKENS, 32 * vector * warps, streams)).by_columns(tokens)


def lanes(tokens: int, streams: int = 1) -> Tiling:
    """Tiles for token-wise numbers, with one token per lane of a program."""
    shape = Shape(D=1, TOKENS=LANES, WIDTH=1, STREAMS=streams, PADDED=triton.next_power_of_2(streams))
    return Tiling((triton.cdiv(tokens, LANES),), 4, shape)


def pointers(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors as one kernel argument, padded to a power of two so that kernels compile for few lengths."""
    return (*tensors, *tensors[-1:] * (triton.next_power_of_2(len(tensors)) - len(tensors)))


def route(arguments: Any) -> dict[str, tuple[int, ...]]:
    """The route of a prefix or a read, as constants of its kernel."""
    return {"KEY": tuple(arguments.key), "VALUE": tuple(arguments.value)}


def launch(kernel: Any, tiling: Tiling, *arguments: Any, **constants: Any) -> None:
    """Start `kernel` on the device of its first tensor, current or not; do nothing if the grid is empty."""
    if not all(tiling.grid):
        return
    options = {"num_warps": tiling.warps}
    if not INTERPRETED and not torch.version.hip:  # otherwise ptxas may spill registers to fit one more program
        options["maxnreg"] = min(255, 65536 // (32 * tiling.warps))
    with torch.cuda.device_of(next(_tensors(arguments))):
        kernel[tiling.grid](*arguments, **constants, SHAPE=_constant(tiling.shape), **options)


@functools.cache
def _constant(shape: Shape) -> Shape:
    """A shape whose fields are compile-time constants when a kernel reads them; the interpreter takes plain numbers."""
    return shape if INTERPRETED else Shape(*map(tl.constexpr, shape))


def _tensors(arguments: Sequence[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, tuple):
            yield from _tensors(argument)
