"""The live streams as a state, on a GPU: the block's output P^j = Σ_k C_k^j u_k, and its gradient."""
# N tokens  D width  J streams  K updates
# ruff: noqa: N803
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, assignment"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualres.ops.triton.common import combine, launch, pick, pointers, rows, stream_rows


def write(updates: list[Tensor], coefficients: Tensor) -> Tensor:
    """`autograd.write`."""
    streams, *shape = coefficients.shape[1:]
    tokens, width = math.prod(shape), updates[0].shape[-1]
    live = updates[0].new_empty(streams, *shape, width)
    tile = rows(width, streams)
    launch(
        _write,
        tile.grid(tokens),
        pointers(updates),
        coefficients,
        live,
        tokens,
        len(updates),
        STREAMS=streams,
        D=width,
        TOKENS=tile.tokens,
        WIDTH=tile.width,
        warps=tile.warps,
    )
    return live


def write_backward(d_live: Tensor, updates: list[Tensor], coefficients: Tensor) -> list[Tensor]:
    """`autograd.write_backward`."""
    streams, *shape = coefficients.shape[1:]
    tokens, width = math.prod(shape), d_live.shape[-1]
    d_updates = [torch.empty_like(d_live[0]) for _ in coefficients]
    d_coefficients = torch.empty_like(coefficients)
    tile = rows(width, streams)
    launch(
        _write_backward,
        tile.grid(tokens),
        d_live,
        pointers(updates or d_updates),
        pointers(d_updates),
        coefficients,
        d_coefficients,
        tokens,
        len(d_updates),
        LEARNED=bool(updates),
        STREAMS=streams,
        D=width,
        TOKENS=tile.tokens,
        WIDTH=tile.width,
        warps=tile.warps,
    )
    return [*d_updates, *([d_coefficients] if updates else [])]


@triton.jit(do_not_specialize=["tokens", "count"])
def _write(
    updates,
    coefficients,
    live,
    tokens: tl.int64,
    count,
    STREAMS: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """P^j = Σ_k C_k^j u_k."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, WIDTH)
    present = token < tokens
    mask = present[:, None] & (column < D)[None, :]
    at = token[:, None] * D + column[None, :]
    found = combine(updates, coefficients, count, tokens, token, present, at, mask, STREAMS, TOKENS, WIDTH)
    for j in tl.static_range(STREAMS):
        tl.store(live + j * tokens * D + at, found[j].to(live.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["tokens", "count"])
def _write_backward(
    d_live,
    updates,
    d_updates,
    coefficients,
    d_coefficients,
    tokens: tl.int64,
    count,
    LEARNED: tl.constexpr,
    STREAMS: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """du_k = Σ_j C_k^j dP^j, dC_k^j = u_k · dP^j."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, WIDTH)
    present = token < tokens
    mask = present[:, None] & (column < D)[None, :]
    at = token[:, None] * D + column[None, :]
    gradients = stream_rows(d_live, tokens, at, mask, D, STREAMS)
    for k in range(0, count):
        d_update = tl.zeros([TOKENS, WIDTH], tl.float32)
        for j in tl.static_range(STREAMS):
            weight = tl.load(coefficients + (k * STREAMS + j) * tokens + token, present, other=0.0)
            d_update += weight[:, None] * gradients[j].to(tl.float32)
        place = pick(d_updates, k) + at
        tl.store(place, d_update.to(place.dtype.element_ty), mask)
        if LEARNED:
            update = tl.load(pick(updates, k) + at, mask, other=0.0).to(tl.float32)
            for j in tl.static_range(STREAMS):
                d_weight = tl.sum(update * gradients[j].to(tl.float32), 1)
                tl.store(d_coefficients + (k * STREAMS + j) * tokens + token, d_weight, present)
