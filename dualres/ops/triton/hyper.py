"""What a branch of mHC reads, on a GPU: two passes over its rows, with the token-wise gates and Sinkhorn between them.

All gates together are a thin matrix product, so tokens are taken by tiles and their live streams are made tile by tile;
h = Σ_j H_pre^j X^j = Σ_k w_k u_k with w_k = Σ_j H_pre^j C_k^j is then a sum over the updates.
"""
# N tokens  D width  J streams  K updates  G gate values: J of H_pre, J of H_post, J·J of H_res
# ruff: noqa: N803
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, assignment"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualres.ops.arguments import HyperReadArguments
from dualres.ops.triton.common import INTERPRETED, combine, inverse_rms, launch, parameter, pointers, precision, rows

LANES = 128  # tokens of a program that works on token-wise numbers
FAR = tl.constexpr(-1e30)  # the logit of an entry that pads the matrix: finite, because −∞ − (−∞) is not a number


class Gates(NamedTuple):
    """The three gates as one."""

    weight: Tensor  # (G,J,D)
    scale: Tensor  # (G,)
    bias: Tensor  # (G,)


class Tile(NamedTuple):
    """Tokens by columns, for the matrix units."""

    tokens: int
    width: int
    warps: int


class Mixing(NamedTuple):
    """The gates of every token and what is made of them, all float32."""

    projected: Tensor  # x W (G,N)
    scale: Tensor  # the inverse norm of the live streams (N,)
    next_coefficients: Tensor  # (K+1,J,N)
    weights: Tensor  # of the updates in h (K,N)
    potentials: Tensor  # log of what each Sinkhorn step divided the columns and the rows by (steps,2,J,N)


def hyper_read(given: HyperReadArguments) -> tuple[Tensor, Tensor]:
    """`autograd.hyper_read`."""
    updates, coefficients, gates, norm, steps, eps, norm_eps = given
    width = updates[0].shape[-1]
    tokens = updates[0].numel() // width
    mixing = mix(updates, coefficients, join(gates), steps, eps, keep=False)
    h = torch.empty_like(updates[0])
    tile = rows(width)
    launch(
        _sum_rows,
        tile.grid(tokens),
        pointers(updates),
        mixing.weights,
        norm,
        h,
        tokens,
        len(updates),
        norm_eps,
        D=width,
        TOKENS=tile.tokens,
        WIDTH=tile.width,
        warps=tile.warps,
    )
    return h, mixing.next_coefficients.view(len(updates) + 1, *coefficients.shape[1:])


def join(gates: list[Tensor]) -> Gates:
    """H_pre, H_post and H_res, each weight, scale and bias, as one gate with a scale for every value."""
    weights, scales, biases = gates[0::3], gates[1::3], gates[2::3]
    scale = torch.cat([scale.expand(len(bias)) for scale, bias in zip(scales, biases, strict=True)])
    return Gates(torch.cat(weights), scale, torch.cat(biases))


def tile_of(streams: int) -> Tile:
    """Over more warps where more streams of a tile are alive at once; few large ones for the interpreter."""
    return Tile(32, 64, 1) if INTERPRETED else Tile(16, 32, 4 if streams <= 4 else 8)


def mix(updates: list[Tensor], coefficients: Tensor, gates: Gates, steps: int, eps: float, keep: bool) -> Mixing:
    """The gates of every token, and the coefficients that its write leaves; `keep` the potentials for a backward."""
    count, streams = coefficients.shape[:2]
    values, _, width = gates.weight.shape
    tokens = updates[0].numel() // width
    new = coefficients.new_empty
    kept = new(steps if keep else 0, 2, streams, tokens)
    mixing = Mixing(new(values, tokens), new(tokens), new(count + 1, streams, tokens), new(count, tokens), kept)
    tile = tile_of(streams)
    launch(
        _project,
        (triton.cdiv(tokens, tile.tokens),),
        pointers(updates),
        coefficients,
        gates.weight,
        mixing.projected,
        mixing.scale,
        tokens,
        count,
        eps,
        STREAMS=streams,
        VALUES=values,
        PADDED=max(16, triton.next_power_of_2(values)),
        D=width,
        TOKENS=tile.tokens,
        WIDTH=tile.width,
        PRECISION=precision(),
        warps=tile.warps,
    )
    launch(
        _mix,
        (triton.cdiv(tokens, LANES),),
        coefficients,
        mixing.projected,
        mixing.scale,
        gates.scale,
        gates.bias,
        mixing.next_coefficients,
        mixing.weights,
        mixing.potentials,
        tokens,
        count,
        steps,
        KEEP=keep,
        STREAMS=streams,
        PADDED=triton.next_power_of_2(streams),
        LANES=LANES,
        warps=4,
    )
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
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x W of all gate values, and the inverse norm of [X⁰; X¹; …]."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    present = token < tokens
    value = tl.arange(0, PADDED)
    total = tl.zeros([TOKENS, PADDED], tl.float32)
    squares = tl.zeros([TOKENS], tl.float32)
    for start in range(0, D, WIDTH):
        column = start + tl.arange(0, WIDTH)
        mask = present[:, None] & (column < D)[None, :]
        at = token[:, None] * D + column[None, :]
        live = combine(updates, coefficients, count, tokens, token, present, at, mask, STREAMS, TOKENS, WIDTH)
        for j in tl.static_range(STREAMS):
            squares += tl.sum(live[j] * live[j], 1)
            place = weight + (value[None, :] * STREAMS + j) * D + column[:, None]
            part = tl.load(place, (value < VALUES)[None, :] & (column < D)[:, None], other=0.0)
            total = tl.dot(live[j], part, total, input_precision=PRECISION)
    tl.store(scales + token, tl.rsqrt(squares / (STREAMS * D) + eps), present)
    place = projected + value[None, :] * tokens + token[:, None]
    tl.store(place, total, present[:, None] & (value < VALUES)[None, :])


@triton.jit
def gate_logits(projected, inverse, scale, bias, value, tokens, token, mask):
    """z = scale · x̄ W + bias of the gate values `value`, with tokens along the last axis."""
    e = tl.load(projected + value * tokens + token, mask, other=0.0)
    return tl.load(scale + value, mask, other=0.0) * inverse * e + tl.load(bias + value, mask, other=0.0)


@triton.jit
def mixing_logits(projected, inverse, scale, bias, tokens, token, present, STREAMS: tl.constexpr, PADDED: tl.constexpr):
    """The logits of H_res (PADDED, PADDED, LANES); the padding is a matrix of its own, far from the real one."""
    i, j = tl.arange(0, PADDED)[:, None, None], tl.arange(0, PADDED)[None, :, None]
    real = (i < STREAMS) & (j < STREAMS) & present[None, None, :]
    value = 2 * STREAMS + i * STREAMS + j
    z = gate_logits(projected, inverse[None, None, :], scale, bias, value, tokens, token[None, None, :], real)
    return tl.where((i < STREAMS) == (j < STREAMS), z, FAR)


@triton.jit
def _log_sum_exp(z, AXIS: tl.constexpr):
    top = tl.max(z, AXIS, keep_dims=True)
    return top + tl.log(tl.sum(tl.exp(z - top), AXIS, keep_dims=True))


@triton.jit(do_not_specialize=["tokens", "count", "steps"])
def _mix(
    coefficients,
    projected,
    scales,
    scale,
    bias,
    next_coefficients,
    weights,
    potentials,
    tokens: tl.int64,
    count,
    steps,
    KEEP: tl.constexpr,
    STREAMS: tl.constexpr,
    PADDED: tl.constexpr,
    LANES: tl.constexpr,
):
    """[H_res C, H_post] and Σ_j H_pre^j C^j. Sinkhorn by its potentials: log H_res = z − f_i − g_j, where the columns
    give g = lse_i(z − f) and then the rows f = lse_j(z − g)."""
    token = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    present = token < tokens
    inverse = tl.load(scales + token, present, other=0.0)
    i, j = tl.arange(0, PADDED)[:, None, None], tl.arange(0, PADDED)[None, :, None]
    lane, here = token[None, None, :], present[None, None, :]
    z = mixing_logits(projected, inverse, scale, bias, tokens, token, present, STREAMS, PADDED)
    f = tl.zeros([PADDED, 1, LANES], tl.float32)
    g = tl.zeros([1, PADDED, LANES], tl.float32)
    for step in range(0, steps):
        g = _log_sum_exp(z - f, 0)
        f = _log_sum_exp(z - g, 1)
        if KEEP:
            tl.store(potentials + (step * 2 * STREAMS + j) * tokens + lane, g, here & (j < STREAMS))
            tl.store(potentials + (step * 2 * STREAMS + STREAMS + i) * tokens + lane, f, here & (i < STREAMS))
    matrix = tl.exp(z - f - g)
    of_column = here & (j < STREAMS)
    pre = tl.sigmoid(gate_logits(projected, inverse[None, None, :], scale, bias, j, tokens, lane, of_column))
    for k in range(0, count):
        c = tl.load(coefficients + (k * STREAMS + j) * tokens + lane, of_column, other=0.0)
        moved = tl.sum(matrix * c, 1, keep_dims=True)
        tl.store(next_coefficients + (k * STREAMS + i) * tokens + lane, moved, here & (i < STREAMS))
        tl.store(weights + k * tokens + lane, tl.sum(pre * c, 1, keep_dims=True), here)
    post = gate_logits(projected, inverse[None, None, :], scale, bias, STREAMS + j, tokens, lane, of_column)
    tl.store(next_coefficients + (count * STREAMS + j) * tokens + lane, 2 * tl.sigmoid(post), of_column)


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
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, WIDTH)
    present = token < tokens
    mask = present[:, None] & (column < D)[None, :]
    at = token[:, None] * D + column[None, :]
    mixed = combine(updates, weights, count, tokens, token, present, at, mask, 1, TOKENS, WIDTH)
    row = mixed[0]
    if norm is not None:
        row = row * inverse_rms(mixed, norm_eps, D)[:, None] * parameter(norm, column, D)
    tl.store(h + at, row.to(h.dtype.element_ty), mask)
