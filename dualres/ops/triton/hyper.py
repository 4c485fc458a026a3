"""What a branch of mHC reads, on a GPU: two passes over its rows, with the token-wise gates and Sinkhorn between them.

All gates together are a thin matrix product, so tokens and their live streams are processed in tiles;
h = Σ_j H_pre^j X^j = Σ_k w_k u_k with w_k = Σ_j H_pre^j C_k^j is then a sum over the updates.
"""
# N tokens  D width  J streams  K updates  G gate values: J of H_pre, J of H_post, J·J of H_res
# ruff: noqa: N803
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, assignment"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualres.ops.arguments import HyperReadArguments
from dualres.ops.triton import tiles
from dualres.ops.triton.launch import INTERPRETED, Tiling, launch, pointers, rows

LANES = 128  # tokens per program of the kernels on token-wise numbers
PADDING_LOGIT = tl.constexpr(-1e30)  # of entries that pad the matrix: finite, because −∞ − (−∞) is NaN


class Gates(NamedTuple):
    """The three gates, concatenated."""

    weight: Tensor  # (G,J,D)
    scale: Tensor  # (G,)
    bias: Tensor  # (G,)


class Mixing(NamedTuple):
    """The gate projections of every token and the results of the gates, all float32."""

    projected: Tensor  # x W (G,N)
    scale: Tensor  # the inverse norm of the live streams (N,)
    next_coefficients: Tensor  # (K+1,J,N)
    weights: Tensor  # of the updates in h (K,N)
    potentials: Tensor | None  # the log column and row sums that each Sinkhorn step divided by (steps,2,J,N)


def hyper_read(arguments: HyperReadArguments) -> tuple[Tensor, Tensor]:
    updates, norm, mixing = arguments.updates, arguments.norm, mix(arguments, join(arguments.gates), keep=False)
    h, tokens = torch.empty_like(updates[0]), mixing.scale.numel()
    tiling = rows(tokens, h.shape[-1])
    launch(_sum_rows, tiling, pointers(updates), mixing.weights, norm, h, tokens, len(updates), arguments.norm_eps)
    return h, mixing.next_coefficients.view(len(updates) + 1, *arguments.coefficients.shape[1:])


def join(gates: list[Tensor]) -> Gates:
    """H_pre, H_post and H_res as one gate, with a scale for every value."""
    weights, scales, biases = gates[0::3], gates[1::3], gates[2::3]
    scale = torch.cat([scale.expand(len(bias)) for scale, bias in zip(scales, biases, strict=True)])
    return Gates(torch.cat(weights), scale, torch.cat(biases))


def matrix_tiles(tokens: int, gates: Gates) -> Tiling:
    """Tiles of tokens by columns for the matrix units, with more warps for more streams; for the interpreter, few
    large tiles."""
    values, streams, width = gates.weight.shape
    tile_tokens, tile_width, warps = (32, 64, 1) if INTERPRETED else (16, 32, 4 if streams <= 4 else 8)
    constants = {
        "STREAMS": streams,
        "VALUES": values,
        "PADDED": max(16, triton.next_power_of_2(values)),
        "PRECISION": "ieee" if torch.version.hip else "tf32x3",  # float32 exactly, or as three products of tf32 parts
        "D": width,
        "TOKENS": tile_tokens,
        "WIDTH": tile_width,
    }
    return Tiling((triton.cdiv(tokens, tile_tokens),), warps, constants)


def lane_tiles(tokens: int, streams: int) -> Tiling:
    """Tiles for token-wise numbers, with one token per lane of a program."""
    constants = {"STREAMS": streams, "PADDED": triton.next_power_of_2(streams), "LANES": LANES}
    return Tiling((triton.cdiv(tokens, LANES),), 4, constants)


def mix(arguments: HyperReadArguments, gates: Gates, keep: bool) -> Mixing:
    """The gates of every token and its next coefficients; `keep` stores the potentials for a backward pass."""
    coefficients = arguments.coefficients
    count, streams = coefficients.shape[:2]
    tokens, new = coefficients[0, 0].numel(), coefficients.new_empty
    mixing = Mixing(
        projected=new(len(gates.bias), tokens),
        scale=new(tokens),
        next_coefficients=new(count + 1, streams, tokens),
        weights=new(count, tokens),
        potentials=new(arguments.steps, 2, streams, tokens) if keep else None,
    )
    launch(
        _project,
        matrix_tiles(tokens, gates),
        pointers(arguments.updates),
        coefficients,
        gates.weight,
        mixing.projected,
        mixing.scale,
        tokens,
        count,
        arguments.eps,
    )
    launch(_mix, lane_tiles(tokens, streams), coefficients, gates, mixing, tokens, count, arguments.steps)
    return mixing


@triton.jit(do_not_specialize=["tokens", "count"])
def _project(
    updates,
    coefficients,
    weight,
    projected,
    scales,
    tokens: tl.int64,
    count,
    eps,
    STREAMS: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """x W of all gate values, and the inverse norm of [X⁰; X¹; …]."""
    token = tiles.tokens_of_program(TOKENS)
    present = token < tokens
    value = tl.arange(0, PADDED)
    total = tl.zeros([TOKENS, PADDED], tl.float32)
    squares = tl.zeros([TOKENS], tl.float32)
    for start in range(0, D, WIDTH):
        column = start + tl.arange(0, WIDTH)
        live = tiles.combine(updates, coefficients, count, tiles.tile_at(token, column, tokens, D), STREAMS)
        for j in tl.static_range(STREAMS):
            squares += tl.sum(live[j] * live[j], 1)
            place = weight + (value[None, :] * STREAMS + j) * D + column[:, None]
            part = tl.load(place, (value < VALUES)[None, :] & (column < D)[:, None], other=0.0)
            total = tl.dot(live[j], part, total, input_precision=PRECISION)
    tl.store(scales + token, tl.rsqrt(squares / (STREAMS * D) + eps), present)
    place = projected + value[None, :] * tokens + token[:, None]
    tl.store(place, total, present[:, None] & (value < VALUES)[None, :])


class Lanes(NamedTuple):
    """The matrices of a program's tokens, (PADDED, PADDED, LANES): entries with i or j ≥ STREAMS are padding."""

    tokens: Any  # N
    i: Any
    j: Any
    token: Any
    present: Any
    of_row: Any  # whether the token and the row exist
    of_column: Any
    inverse: Any  # the inverse norm of the live streams


@triton.jit
def lanes_of_program(mixing, tokens, STREAMS: tl.constexpr, PADDED: tl.constexpr, LANES: tl.constexpr):
    i, j = tl.arange(0, PADDED)[:, None, None], tl.arange(0, PADDED)[None, :, None]
    token = tiles.tokens_of_program(LANES)
    present = token < tokens
    inverse = tl.load(mixing.scale + token, present, other=0.0)[None, None, :]
    token, present = token[None, None, :], present[None, None, :]
    return Lanes(tokens, i, j, token, present, present & (i < STREAMS), present & (j < STREAMS), inverse)


@triton.jit
def gate_logits(gates, mixing, value, lanes, mask):
    """z = scale · x̄ W + bias of the gate values `value`."""
    e = tl.load(mixing.projected + value * lanes.tokens + lanes.token, mask, other=0.0)
    scale, bias = tl.load(gates.scale + value, mask, other=0.0), tl.load(gates.bias + value, mask, other=0.0)
    return scale * lanes.inverse * e + bias


@triton.jit
def mixing_logits(gates, mixing, lanes, STREAMS: tl.constexpr):
    """The logits of H_res; the padding forms a separate block that does not mix with the real entries."""
    real = lanes.of_row & (lanes.j < STREAMS)
    z = gate_logits(gates, mixing, (2 + lanes.i) * STREAMS + lanes.j, lanes, real)
    return tl.where((lanes.i < STREAMS) == (lanes.j < STREAMS), z, PADDING_LOGIT)


@triton.jit
def _log_sum_exp(z, AXIS: tl.constexpr):
    top = tl.max(z, AXIS, keep_dims=True)
    return top + tl.log(tl.sum(tl.exp(z - top), AXIS, keep_dims=True))


@triton.jit(do_not_specialize=["tokens", "count", "steps"])
def _mix(
    coefficients,
    gates,
    mixing,
    tokens: tl.int64,
    count,
    steps,
    STREAMS: tl.constexpr,
    PADDED: tl.constexpr,
    LANES: tl.constexpr,
):
    """[H_res C, H_post] and Σ_j H_pre^j C^j. Sinkhorn by its potentials: log H_res = z − f_i − g_j, where the
    columns give g = lse_i(z − f), then the rows f = lse_j(z − g)."""
    lanes = lanes_of_program(mixing, tokens, STREAMS, PADDED, LANES)
    i, j, token, of_row, of_column = lanes.i, lanes.j, lanes.token, lanes.of_row, lanes.of_column
    z = mixing_logits(gates, mixing, lanes, STREAMS)
    f = tl.zeros([PADDED, 1, LANES], tl.float32)
    g = tl.zeros([1, PADDED, LANES], tl.float32)
    for step in range(0, steps):
        g = _log_sum_exp(z - f, 0)
        f = _log_sum_exp(z - g, 1)
        if mixing.potentials is not None:
            tl.store(mixing.potentials + (step * 2 * STREAMS + j) * tokens + token, g, of_column)
            tl.store(mixing.potentials + (step * 2 * STREAMS + STREAMS + i) * tokens + token, f, of_row)
    matrix = tl.exp(z - f - g)
    pre = tl.sigmoid(gate_logits(gates, mixing, j, lanes, of_column))
    for k in range(0, count):
        c = tl.load(coefficients + (k * STREAMS + j) * tokens + token, of_column, other=0.0)
        mixed_coefficient = tl.sum(matrix * c, 1, keep_dims=True)
        tl.store(mixing.next_coefficients + (k * STREAMS + i) * tokens + token, mixed_coefficient, of_row)
        tl.store(mixing.weights + k * tokens + token, tl.sum(pre * c, 1, keep_dims=True), lanes.present)
    post = tl.sigmoid(gate_logits(gates, mixing, STREAMS + j, lanes, of_column))
    tl.store(mixing.next_coefficients + (count * STREAMS + j) * tokens + token, 2 * post, of_column)


@triton.jit(do_not_specialize=["tokens", "count"])
def _sum_rows(
    updates,
    weights,
    norm,
    h,
    tokens: tl.int64,
    count,
    norm_eps,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """h = Norm(Σ_k w_k u_k)."""
    tile = tiles.rows_of_program(tokens, D, TOKENS, WIDTH)
    mixed = tiles.combine(updates, weights, count, tile, 1)
    tiles.store_row(h, tile, tiles.norm_forward(mixed[0], norm, norm_eps, tile))
