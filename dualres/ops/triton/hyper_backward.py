"""The gradient of what a branch of mHC reads, on a GPU.

Passes over the rows and token-wise kernels take turns: the gates again; d h · u_k; through Sinkhorn to the gradient of
every gate value; then, tile by tile, the gradients of the rows, and those of the weights over chunks of tokens.
"""
# N tokens  D width  J streams  K updates  G gate values: J of H_pre, J of H_post, J·J of H_res
# ruff: noqa: N803
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualres.ops.arguments import HyperReadArguments
from dualres.ops.triton.common import (
    added,
    chunks,
    combine,
    inverse_rms,
    launch,
    parameter,
    pick,
    pointers,
    precision,
    rows,
    zeros,
)
from dualres.ops.triton.hyper import LANES, gate_logits, join, mix, mixing_logits, tile_of


def hyper_read_backward(d_h: Tensor, d_next: Tensor, given: HyperReadArguments) -> list[Tensor]:
    """`autograd.hyper_read_backward`."""
    updates, coefficients, gates, norm, steps, eps, norm_eps = given
    joined = join(gates)
    count, streams = coefficients.shape[:2]
    values, _, width = joined.weight.shape
    tokens = d_h.numel() // width
    mixing = mix(updates, coefficients, joined, steps, eps, keep=True)
    products = torch.empty_like(mixing.weights)  # d h · u_k (K,N)
    normed = mixing.scale.new_empty(2, tokens)  # dh = normed[0] · w ⊙ dy − normed[1] · h
    tile = rows(width)
    launch(
        _products,
        tile.grid(tokens),
        d_h,
        pointers(updates),
        mixing.weights,
        norm,
        products,
        normed,
        tokens,
        count,
        norm_eps,
        D=width,
        TOKENS=tile.tokens,
        WIDTH=tile.width,
        warps=tile.warps,
    )
    d_logits = torch.empty_like(mixing.projected)  # dz (G,N)
    d_coefficients = torch.empty_like(coefficients)
    pre = mixing.next_coefficients.new_empty(streams, tokens)
    launch(
        _mix_backward,
        (triton.cdiv(tokens, LANES),),
        d_next,
        coefficients,
        mixing.projected,
        mixing.scale,
        joined.scale,
        joined.bias,
        mixing.potentials,
        products,
        pre,
        d_logits,
        d_coefficients,
        tokens,
        count,
        steps,
        STREAMS=streams,
        PADDED=triton.next_power_of_2(streams),
        LANES=LANES,
        warps=4,
    )
    factors = d_logits * mixing.scale * joined.scale[:, None]  # of W in dX, of X in dW (G,N)
    shrinks = (factors * mixing.projected).sum(0) * mixing.scale.square() / (streams * width)  # by the norm of X (N,)
    d_updates = [torch.empty_like(update) for update in updates]
    step = tile_of(streams)
    constants = {
        "STREAMS": streams,
        "VALUES": values,
        "PADDED": max(16, triton.next_power_of_2(values)),
        "D": width,
        "TOKENS": step.tokens,
        "WIDTH": step.width,
        "PRECISION": precision(),
    }
    launch(
        _row_gradients,
        (triton.cdiv(tokens, step.tokens),),
        d_h,
        pointers(updates),
        pointers(d_updates),
        coefficients,
        d_coefficients,
        joined.weight,
        norm,
        pre,
        normed,
        factors,
        shrinks,
        tokens,
        count,
        **constants,
        PAIRS=triton.next_power_of_2(count * streams),
        warps=step.warps,
    )
    chunk, grid = chunks(tokens, width, step.width, step.tokens, step.warps)
    partial = joined.weight.new_empty(grid[1], values, streams, width)
    partial_norm = joined.weight.new_empty(grid[1], width)
    launch(
        _weight_gradients,
        grid,
        d_h,
        pointers(updates),
        coefficients,
        pre,
        normed,
        factors,
        partial,
        partial_norm,
        tokens,
        count,
        chunk,
        NORMED=norm is not None,
        **constants,
        warps=step.warps,
    )
    sizes = [len(bias) for bias in gates[2::3]]
    shares = (d_logits * mixing.scale * mixing.projected).split(sizes)  # of the scales
    d_gates = []
    for d_weight, d_scale, d_bias in zip(partial.split(sizes, 1), shares, d_logits.split(sizes), strict=True):
        d_gates += [d_weight.sum(0), d_scale.sum().view(1), d_bias.sum(1)]
    return [*d_updates, d_coefficients, *d_gates, *([partial_norm.sum(0)] if norm is not None else [])]


@triton.jit(do_not_specialize=["tokens", "count"])
def _products(
    d_h,
    updates,
    weights,
    norm,
    products,
    normed,
    tokens: tl.int64,
    count,
    norm_eps,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """dh · u_k, with dh = r w ⊙ dy − r³ (w ⊙ dy · h)/D h behind the norm of the branch; and these two factors."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, WIDTH)
    present = token < tokens
    mask = present[:, None] & (column < D)[None, :]
    at = token[:, None] * D + column[None, :]
    gradient = tl.load(d_h + at, mask, other=0.0).to(tl.float32)
    if norm is not None:
        mixed = combine(updates, weights, count, tokens, token, present, at, mask, 1, TOKENS, WIDTH)
        r = inverse_rms(mixed, norm_eps, D)
        gradient = gradient * parameter(norm, column, D)
        taken = r * r * r * tl.sum(gradient * mixed[0], 1) / D
        gradient = r[:, None] * gradient - taken[:, None] * mixed[0]
        tl.store(normed + token, r, present)
        tl.store(normed + tokens + token, taken, present)
    for k in range(0, count):
        update = tl.load(pick(updates, k) + at, mask, other=0.0).to(tl.float32)
        tl.store(products + k * tokens + token, tl.sum(gradient * update, 1), present)


@triton.jit(do_not_specialize=["tokens", "count", "steps"])
def _mix_backward(
    d_next,
    coefficients,
    projected,
    scales,
    scale,
    bias,
    potentials,
    products,
    pre,
    d_logits,
    d_coefficients,
    tokens: tl.int64,
    count,
    steps,
    STREAMS: tl.constexpr,
    PADDED: tl.constexpr,
    LANES: tl.constexpr,
):
    """dz of every gate value, H_pre, and dC as far as it comes through H_res C.

    Half a Sinkhorn step, L' = L − lse(L), has dL = dL' − exp(L') Σ dL': only its results count, from the potentials.
    """
    token = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    present = token < tokens
    inverse = tl.load(scales + token, present, other=0.0)
    i, j = tl.arange(0, PADDED)[:, None, None], tl.arange(0, PADDED)[None, :, None]
    lane, here = token[None, None, :], present[None, None, :]
    of_row, of_column = here & (i < STREAMS), here & (j < STREAMS)
    z = mixing_logits(projected, inverse, scale, bias, tokens, token, present, STREAMS, PADDED)
    f = tl.zeros([PADDED, 1, LANES], tl.float32)
    g = tl.zeros([1, PADDED, LANES], tl.float32)
    if steps > 0:
        last = potentials + (steps - 1) * 2 * STREAMS * tokens
        g = tl.load(last + j * tokens + lane, of_column, other=0.0)
        f = tl.load(last + (STREAMS + i) * tokens + lane, of_row, other=0.0)
    matrix = tl.exp(z - f - g)
    d_matrix = tl.zeros([PADDED, PADDED, LANES], tl.float32)
    d_pre = tl.zeros([1, PADDED, LANES], tl.float32)
    for k in range(0, count):
        c = tl.load(coefficients + (k * STREAMS + j) * tokens + lane, of_column, other=0.0)
        d_moved = tl.load(d_next + (k * STREAMS + i) * tokens + lane, of_row, other=0.0)
        d_matrix += d_moved * c
        d_pre += c * tl.load(products + k * tokens + lane, here, other=0.0)
        d_c = tl.sum(matrix * d_moved, 0, keep_dims=True)
        tl.store(d_coefficients + (k * STREAMS + j) * tokens + lane, d_c, of_column)
    opened = tl.sigmoid(gate_logits(projected, inverse[None, None, :], scale, bias, j, tokens, lane, of_column))
    tl.store(pre + j * tokens + lane, opened, of_column)
    tl.store(d_logits + j * tokens + lane, d_pre * opened * (1 - opened), of_column)
    opened = tl.sigmoid(
        gate_logits(projected, inverse[None, None, :], scale, bias, STREAMS + j, tokens, lane, of_column)
    )
    d_post = tl.load(d_next + (count * STREAMS + j) * tokens + lane, of_column, other=0.0)
    tl.store(d_logits + (STREAMS + j) * tokens + lane, d_post * 2 * opened * (1 - opened), of_column)
    d_z = d_matrix * matrix
    for back in range(0, steps):
        step = steps - 1 - back
        d_z -= tl.exp(z - f - g) * tl.sum(d_z, 1, keep_dims=True)
        before = potentials + (step - 1) * 2 * STREAMS * tokens
        f = tl.load(before + (STREAMS + i) * tokens + lane, of_row & (step > 0), other=0.0)
        d_z -= tl.exp(z - f - g) * tl.sum(d_z, 0, keep_dims=True)
        g = tl.load(before + j * tokens + lane, of_column & (step > 0), other=0.0)
    place = d_logits + (2 * STREAMS + i * STREAMS + j) * tokens + lane
    tl.store(place, d_z, of_row & (j < STREAMS))


@triton.jit
def _live_tile(updates, coefficients, pre, count, tokens, token, present, at, mask, STREAMS, TOKENS, WIDTH):
    """The live streams X^j, H_pre^j, and their sum h before the norm."""
    live = combine(updates, coefficients, count, tokens, token, present, at, mask, STREAMS, TOKENS, WIDTH)
    weights, mixed = (), tl.zeros([TOKENS, WIDTH], tl.float32)
    for j in tl.static_range(STREAMS):
        weight = tl.load(pre + j * tokens + token, present, other=0.0)[:, None]
        weights = weights + (weight,)
        mixed += weight * live[j]
    return live, weights, mixed


@triton.jit(do_not_specialize=["tokens", "count"])
def _row_gradients(
    d_h,
    updates,
    d_updates,
    coefficients,
    d_coefficients,
    weight,
    norm,
    pre,
    normed,
    factors,
    shrinks,
    tokens: tl.int64,
    count,
    STREAMS: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """dX^j = H_pre^j dh + Σ_g factor_g W_g^j − shrink · X^j; du_k = Σ_j C_k^j dX^j; dC_k^j += u_k · dX^j."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    present = token < tokens
    value, pair = tl.arange(0, PADDED), tl.arange(0, PAIRS)
    place = factors + value[None, :] * tokens + token[:, None]
    factor = tl.load(place, present[:, None] & (value < VALUES)[None, :], other=0.0)
    shrink = tl.load(shrinks + token, present, other=0.0)[:, None]
    d_pairs = tl.zeros([TOKENS, PAIRS], tl.float32)
    for start in range(0, D, WIDTH):
        column = start + tl.arange(0, WIDTH)
        mask = present[:, None] & (column < D)[None, :]
        at = token[:, None] * D + column[None, :]
        live, weights, mixed = _live_tile(
            updates, coefficients, pre, count, tokens, token, present, at, mask, STREAMS, TOKENS, WIDTH
        )
        gradient = tl.load(d_h + at, mask, other=0.0).to(tl.float32)
        if norm is not None:
            r = tl.load(normed + token, present, other=0.0)[:, None]
            taken = tl.load(normed + tokens + token, present, other=0.0)[:, None]
            gradient = r * parameter(norm, column, D) * gradient - taken * mixed
        d_live = ()
        for j in tl.static_range(STREAMS):
            weight_at = weight + (value[:, None] * STREAMS + j) * D + column[None, :]
            part = tl.load(weight_at, (value < VALUES)[:, None] & (column < D)[None, :], other=0.0)
            through_gates = tl.dot(factor, part, input_precision=PRECISION)
            d_live = d_live + (weights[j] * gradient + through_gates - shrink * live[j],)
        for k in range(0, count):
            update = tl.load(pick(updates, k) + at, mask, other=0.0).to(tl.float32)
            d_update = tl.zeros([TOKENS, WIDTH], tl.float32)
            for j in tl.static_range(STREAMS):
                c = tl.load(coefficients + (k * STREAMS + j) * tokens + token, present, other=0.0)
                d_update += c[:, None] * d_live[j]
                d_c = tl.sum(update * d_live[j], 1)
                d_pairs += tl.where(pair[None, :] == k * STREAMS + j, d_c[:, None], 0.0)
            target = pick(d_updates, k) + at
            tl.store(target, d_update.to(target.dtype.element_ty), mask)
    place = d_coefficients + pair[None, :] * tokens + token[:, None]
    known = present[:, None] & (pair < count * STREAMS)[None, :]
    tl.store(place, tl.load(place, known, other=0.0) + d_pairs, known)


@triton.jit(do_not_specialize=["tokens", "count", "chunk"])
def _weight_gradients(
    d_h,
    updates,
    coefficients,
    pre,
    normed,
    factors,
    partial,
    partial_norm,
    tokens: tl.int64,
    count,
    chunk,
    NORMED: tl.constexpr,
    STREAMS: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The chunk's share of dW_g^j = Σ_n factor_g X^j, and of the norm's dw = Σ_n dy ⊙ h r."""
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    part = tl.program_id(1).to(tl.int64)
    value = tl.arange(0, PADDED)
    sums = zeros(STREAMS, PADDED, WIDTH)
    d_norm = tl.zeros([TOKENS, WIDTH], tl.float32)
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, tokens), TOKENS):
        token = start + tl.arange(0, TOKENS)
        present = token < tokens
        mask = present[:, None] & (column < D)[None, :]
        at = token[:, None] * D + column[None, :]
        live, _, mixed = _live_tile(
            updates, coefficients, pre, count, tokens, token, present, at, mask, STREAMS, TOKENS, WIDTH
        )
        place = factors + value[:, None] * tokens + token[None, :]
        factor = tl.load(place, (value < VALUES)[:, None] & present[None, :], other=0.0)
        terms = ()
        for j in tl.static_range(STREAMS):
            terms = terms + (tl.dot(factor, live[j], input_precision=PRECISION),)
        sums = added(sums, terms)
        if NORMED:
            r = tl.load(normed + token, present, other=0.0)[:, None]
            d_norm += r * mixed * tl.load(d_h + at, mask, other=0.0).to(tl.float32)
    for j in tl.static_range(STREAMS):
        place = partial + ((part * VALUES + value[:, None]) * STREAMS + j) * D + column[None, :]
        tl.store(place, sums[j], (value < VALUES)[:, None] & (column < D)[None, :])
    if NORMED:
        tl.store(partial_norm + part * D + column, tl.sum(d_norm, 0), column < D)
