"""The live streams as a state, on a GPU: the block's output P^j = Σ_k C_k^j u_k, and its gradient."""
# N tokens  D width  J streams  K updates
# ruff: noqa: N803
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualres.ops.triton import tiles
from dualres.ops.triton.launch import launch, pointers, rows


def write(updates: list[Tensor], coefficients: Tensor) -> Tensor:
    tokens, width = coefficients[0, 0].numel(), updates[0].shape[-1]
    live = updates[0].new_empty(*coefficients.shape[1:], width)
    tiling = rows(tokens, width, len(live))
    launch(_write, tiling, pointers(updates), coefficients, live, tokens, len(updates), STREAMS=len(live))
    return live


def write_backward(d_live: Tensor, updates: list[Tensor], coefficients: Tensor) -> list[Tensor]:
    tokens, width = coefficients[0, 0].numel(), d_live.shape[-1]
    d_updates = [torch.empty_like(d_live[0]) for _ in coefficients]
    d_coefficients = torch.empty_like(coefficients)
    launch(
        _write_backward,
        rows(tokens, width, len(d_live)),
        d_live,
        pointers(updates),
        pointers(d_updates),
        coefficients,
        d_coefficients,
        tokens,
        len(d_updates),
        STREAMS=len(d_live),
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
    tile = tiles.rows_of_program(tokens, D, TOKENS, WIDTH)
    streams = tiles.combine(updates, coefficients, count, tile, STREAMS)
    for j in tl.static_range(STREAMS):
        tiles.store_row(live + j * tokens * D, tile, streams[j])


@triton.jit(do_not_specialize=["tokens", "count"])
def _write_backward(
    d_live,
    updates,
    d_updates,
    coefficients,
    d_coefficients,
    tokens: tl.int64,
    count,
    STREAMS: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """du_k = Σ_j C_k^j dP^j and, with updates, dC_k^j = u_k · dP^j."""
    tile = tiles.rows_of_program(tokens, D, TOKENS, WIDTH)
    gradients = tiles.load_streams(d_live, tile, STREAMS)
    for k in range(0, count):
        d_weights = tiles.combine_backward(gradients, updates, d_updates, coefficients, k, tile)
        for j in tl.static_range(len(d_weights)):
            tiles.store_number(d_coefficients, k * STREAMS + j, tile, d_weights[j])
