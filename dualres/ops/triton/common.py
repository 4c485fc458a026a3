"""What the kernels share: how large a tile is, how a list of tensors reaches a kernel, how a kernel is started."""
# N tokens  D width  J streams  K updates
# ruff: noqa: N803
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, assignment"

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# The interpreter pays per program and per operation, so there a tile holds many tokens; on a GPU it holds one.
INTERPRETED: bool = triton.knobs.runtime.interpret
TOKENS = 64 if INTERPRETED else 1
RESIDENT_WARPS = 8 if INTERPRETED else 2048  # about what a large GPU keeps in flight
MOST_WARPS = 16  # also the most that a workgroup of 64-lane AMD waves can have
VECTOR = 8  # elements that a thread holds of a row: 16 bytes of bfloat16


class Rows(NamedTuple):
    """A tile of whole rows, for kernels that reduce over the width."""

    tokens: int
    width: int  # D, padded to a power of two
    warps: int

    def grid(self, tokens: int) -> tuple[int]:
        """One program for each tile."""
        return (triton.cdiv(tokens, self.tokens),)


class Columns(NamedTuple):
    """A tile of columns that walks through a chunk of the tokens, for kernels that reduce over the tokens."""

    tokens: int
    width: int
    warps: int
    chunk: int  # tokens that one program walks through
    grid: tuple[int, int]  # tiles over the width, chunks over the tokens


def rows(width: int, sums: int = 1) -> Rows:
    """As many warps as give every thread one vector of the row, and more where it keeps many `sums` of rows."""
    padded = triton.next_power_of_2(width)
    warps = max(1, padded // (32 * VECTOR), triton.next_power_of_2(sums) * padded // (32 * 64))
    return Rows(TOKENS, padded, min(MOST_WARPS, warps))


def columns(tokens: int, width: int, sums: int) -> Columns:
    """A tile that keeps `sums` accumulators."""
    vector = max(1, min(VECTOR, 64 // triton.next_power_of_2(sums)))
    warps = max(count for count in (1, 2, 4) if count == 1 or 32 * vector * count <= width)
    tile = 32 * vector * warps
    return Columns(TOKENS, tile, warps, *chunks(tokens, width, tile, TOKENS, warps))


def chunks(tokens: int, width: int, tile: int, step: int, warps: int) -> tuple[int, tuple[int, int]]:
    """How many tokens, by `step`, a program walks through, and the grid of such programs.

    Both depend on the shape alone, so every run adds in the same order, and their sums take a few MB at any length.
    """
    tiles = triton.cdiv(width, tile)
    parts = triton.cdiv(RESIDENT_WARPS, tiles * warps)
    chunk = max(1, triton.cdiv(tokens, parts * step)) * step
    return chunk, (tiles, triton.cdiv(tokens, chunk))


def precision() -> str:
    """How the matrix units multiply float32: exactly on AMD, as three products of tf32 parts on NVIDIA."""
    return "ieee" if torch.version.hip else "tf32x3"


def pointers(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors as one kernel argument, padded to a power of two so that few lengths are compiled."""
    return (*tensors, *[tensors[-1]] * (triton.next_power_of_2(len(tensors)) - len(tensors)))


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, **constants: Any) -> None:
    """Start `kernel` on the device of its first tensor, which need not be the current one; not for no tokens."""
    if not all(grid):
        return
    with _device(next(_tensors(arguments))):
        kernel[grid](*arguments, **constants, num_warps=warps, **_registers(warps))


def _registers(warps: int) -> dict[str, int]:
    """All that a program of `warps` can have: left alone, ptxas may spill a few to fit one more program."""
    return {} if INTERPRETED or torch.version.hip else {"maxnreg": min(255, 65536 // (32 * warps))}


def _device(tensor: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device_of(tensor) if tensor.is_cuda else nullcontext()


def _tensors(arguments: Sequence[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, tuple):
            yield from _tensors(argument)


@triton.jit
def pick(pointers, index):
    """`pointers[index]` for an index known only at run time."""
    chosen = pointers[0]
    for n in tl.static_range(1, len(pointers)):
        chosen = tl.where(index == n, pointers[n], chosen)
    return chosen


@triton.jit
def parameter(pointer, column, D: tl.constexpr):
    """A row of parameters (1, width): with two axes, it gets the layout of the streams that it meets."""
    return tl.load(pointer + column[None, :], (column < D)[None, :], other=0.0)


@triton.jit
def stream_rows(state, tokens, at, mask, D: tl.constexpr, STREAMS: tl.constexpr):
    """The streams of a state (J,N,D), as stored."""
    made = ()
    for j in tl.static_range(STREAMS):
        made = made + (tl.load(state + j * tokens * D + at, mask, other=0.0),)
    return made


@triton.jit
def inverse_rms(streams, eps, D: tl.constexpr):
    """1 / √(mean x² + eps) over the streams together."""
    total = tl.sum(streams[0] * streams[0], 1)
    for j in tl.static_range(1, len(streams)):
        total += tl.sum(streams[j] * streams[j], 1)
    return tl.rsqrt(total / (len(streams) * D) + eps)


@triton.jit
def zeros(COUNT: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """A tuple of `COUNT` accumulators."""
    made = ()
    for _ in tl.static_range(COUNT):
        made = made + (tl.zeros([TOKENS, WIDTH], tl.float32),)
    return made


@triton.jit
def added(sums, terms):
    """`sums` + `terms`, one by one."""
    made = ()
    for n in tl.static_range(len(sums)):
        made = made + (sums[n] + terms[n],)
    return made


@triton.jit
def combine(
    updates,
    coefficients,  # (K,J,N)
    count,
    tokens,
    token,
    present,
    at,
    mask,
    STREAMS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """P^j = Σ_k C_k^j u_k, a tuple over j."""
    live = zeros(STREAMS, TOKENS, WIDTH)
    for k in tl.range(0, count, num_stages=2):
        update = tl.load(pick(updates, k) + at, mask, other=0.0).to(tl.float32)
        terms = ()
        for j in tl.static_range(STREAMS):
            weight = tl.load(coefficients + (k * STREAMS + j) * tokens + token, present, other=0.0)
            terms = terms + (weight[:, None] * update,)
        live = added(live, terms)
    return live
