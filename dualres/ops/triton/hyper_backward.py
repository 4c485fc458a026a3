"""The gradient of what a branch of mHC reads, on a GPU.

Passes over the rows alternate with token-wise kernels: they recompute the gates and dh · u_k, go back through Sinkhorn
to the gradient of every gate value, then compute row gradients by tiles and weight gradients by chunks of tokens.
"""
# N tokens  D width  J streams  K updates  G gate values: J of H_pre, J of H_post, J·J of H_res
# ruff: noqa: N803
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualres.ops.arguments import HyperReadArguments
from dualres.ops.triton import tiles
from dualres.ops.triton.hyper import gate_logits, join, lane_tiles, lanes_of_program, matrix_tiles, mix, mixing_logits
from dualres.ops.triton.launch import launch, pointers, rows


def hyper_read_backward(d_h: Tensor, d_next: Tensor, arguments: HyperReadArguments) -> list[Tensor]:
    coefficients, norm = arguments.coefficients, arguments.norm
    joined, updates = join(arguments.gates), pointers(arguments.updates)
    count, streams = coefficients.shape[:2]
    mixing = mix(arguments, joined, keep=True)
    tokens, width = mixing.scale.numel(), d_h.shape[-1]
    products = torch.empty_like(mixing.weights)  # d h · u_k (K,N)
    normed = mixing.scale.new_empty(2, tokens)  # dh = normed[0] · w ⊙ dy − normed[1] · h
    launch(
        _products,
        rows(tokens, width),
        d_h,
        updates,
        mixing.weights,
        norm,
        products,
        normed,
        tokens,
        count,
        arguments.norm_eps,
    )
    d_logits = torch.empty_like(mixing.projected)  # dz (G,N)
    d_coefficients = torch.empty_like(coefficients)
    pre = mixing.scale.new_empty(streams, tokens)
    launch(
        _mix_backward,
        lane_tiles(tokens, streams),
        d_next,
        coefficients,
        joined,
        mixing,
        products,
        pre,
        d_logits,
        d_coefficients,
        tokens,
        count,
        arguments.steps,
    )
    factors = d_logits * mixing.scale * joined.scale[:, None]  # of W in dX, of X in dW (G,N)
    shrinks = (factors * mixing.projected).sum(0) * mixing.scale.square() / (streams * width)  # by the norm of X (N,)
    d_updates = [torch.empty_like(update) for update in arguments.updates]
    tiling = matrix_tiles(tokens, joined)
    launch(
        _row_gradients,
        tiling,
        d_h,
        updates,
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
        PAIRS=triton.next_power_of_2(count * streams),
    )
    tiling = tiling.by_columns(tokens)
    partial = joined.weight.new_empty(tiling.grid[1], *joined.weight.shape)
    partial_norm = None if norm is None else norm.new_empty(tiling.grid[1], width)
    launch(
        _weight_gradients,
        tiling,
        d_h,
        updates,
        coefficients,
        pre,
        normed,
        factors,
        partial,
        partial_norm,
        tokens,
        count,
        tiling.chunk,
    )
    sizes = [len(bias) for bias in arguments.gates[2::3]]
    shares = (d_logits * mixing.scale * mixing.projected).split(sizes)  # of the scales
    d_gates = []
    for d_weight, d_scale, d_bias in zip(partial.split(sizes, 1), shares, d_logits.split(sizes), strict=True):
        d_gates += [d_weight.sum(0), d_scale.sum().view(1), d_bias.sum(1)]
    return [*d_updates, d_coefficients, *d_gates, *([] if partial_norm is None else [partial_norm.sum(0)])]


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
    """dh · u_k, with dh before the branch's norm, and the two factors of `norm_backward`."""
    tile = tiles.rows_of_program(tokens, D, TOKENS, WIDTH)
    gradient = tiles.load_row(d_h, tile)
    if norm is not None:
        mixed = tiles.combine(updates, weights, count, tile, 1)
        gradient, r, norm_shrink = tiles.norm_backward(gradient, mixed[0], norm, norm_eps, tile)
        tiles.store_number(normed, 0, tile, r)
        tiles.store_number(normed, 1, tile, norm_shrink)
    for k in range(0, count):
        tiles.store_number(products, k, tile, tl.sum(gradient * tiles.load_row(tiles.pick(updates, k), tile), 1))


@triton.jit(do_not_specialize=["tokens", "count", "steps"])
def _mix_backward(
    d_next,
    coefficients,
    gates,
    mixing,
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
    """dz of every gate value, H_pre, and the part of dC through H_res C.

    Half a Sinkhorn step, L' = L − lse(L), has dL = dL' − exp(L') Σ dL': it needs only L', computed from the potentials.
    """
    lanes = lanes_of_program(mixing, tokens, STREAMS, PADDED, LANES)
    i, j, token, of_row, of_column = lanes.i, lanes.j, lanes.token, lanes.of_row, lanes.of_column
    z = mixing_logits(gates, mixing, lanes, STREAMS)
    last = mixing.potentials + (steps - 1) * 2 * STREAMS * tokens
    g = tl.load(last + j * tokens + token, of_column, other=0.0)
    f = tl.load(last + (STREAMS + i) * tokens + token, of_row, other=0.0)
    matrix = tl.exp(z - f - g)
    d_matrix = tl.zeros([PADDED, PADDED, LANES], tl.float32)
    d_pre = tl.zeros([1, PADDED, LANES], tl.float32)
    for k in range(0, count):
        c = tl.load(coefficients + (k * STREAMS + j) * tokens + token, of_column, other=0.0)
        d_moved = tl.load(d_next + (k * STREAMS + i) * tokens + token, of_row, other=0.0)
        d_matrix += d_moved * c
        d_pre += c * tl.load(products + k * tokens + token, lanes.present, other=0.0)
        d_c = tl.sum(matrix * d_moved, 0, keep_dims=True)
        tl.store(d_coefficients + (k * STREAMS + j) * tokens + token, d_c, of_column)
    gate = tl.sigmoid(gate_logits(gates, mixing, j, lanes, of_column))
    tl.store(pre + j * tokens + token, gate, of_column)
    tl.store(d_logits + j * tokens + token, d_pre * gate * (1 - gate), of_column)
    gate = tl.sigmoid(gate_logits(gates, mixing, STREAMS + j, lanes, of_column))
    d_post = tl.load(d_next + (count * STREAMS + j) * tokens + token, of_column, other=0.0)
    tl.store(d_logits + (STREAMS + j) * tokens + token, d_post * 2 * gate * (1 - gate), of_column)
    d_z = d_matrix * matrix
    for back in range(0, steps):
        step = steps - 1 - back
        d_z -= tl.exp(z - f - g) * tl.sum(d_z, 1, keep_dims=True)
        before = mixing.potentials + (step - 1) * 2 * STREAMS * tokens
        f = tl.load(before + (STREAMS + i) * tokens + token, of_row & (step > 0), other=0.0)
        d_z -= tl.exp(z - f - g) * tl.sum(d_z, 0, keep_dims=True)
        g = tl.load(before + j * tokens + token, of_column & (step > 0), other=0.0)
    tl.store(d_logits + ((2 + i) * STREAMS + j) * tokens + token, d_z, of_row & (j < STREAMS))


@triton.jit
def _live_tile(updates, coefficients, pre, count, tile, STREAMS: tl.constexpr):
    """The live streams X^j, H_pre^j, and their sum h before the norm."""
    live = tiles.combine(updates, coefficients, count, tile, STREAMS)
    weights, mixed = (), tl.zeros(tile.at.shape, tl.float32)
    for j in tl.static_range(STREAMS):
        weight = tiles.load_number(pre, j, tile)[:, None]
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
    PAIRS: tl.constexpr,
    STREAMS: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """dX^j = H_pre^j dh + Σ_g factor_g W_g^j − shrink · X^j; du_k = Σ_j C_k^j dX^j; dC_k^j += u_k · dX^j."""
    token = tiles.tokens_of_program(TOKENS)
    present = token < tokens
    value, pair = tl.arange(0, PADDED), tl.arange(0, PAIRS)
    place = factors + value[None, :] * tokens + token[:, None]
    factor = tl.load(place, present[:, None] & (value < VALUES)[None, :], other=0.0)
    shrink = tl.load(shrinks + token, present, other=0.0)[:, None]
    d_pairs = tl.zeros([TOKENS, PAIRS], tl.float32)
    for start in range(0, D, WIDTH):
        column = start + tl.arange(0, WIDTH)
        tile = tiles.tile_at(token, column, tokens, D)
        live, weights, mixed = _live_tile(updates, coefficients, pre, count, tile, STREAMS)
        gradient = tiles.load_row(d_h, tile)
        if norm is not None:
            r, norm_shrink = tiles.load_number(normed, 0, tile)[:, None], tiles.load_number(normed, 1, tile)[:, None]
            gradient = r * tiles.parameter(norm, tile) * gradient - norm_shrink * mixed
        d_live = ()
        for j in tl.static_range(STREAMS):
            weight_at = weight + (value[:, None] * STREAMS + j) * D + column[None, :]
            part = tl.load(weight_at, (value < VALUES)[:, None] & (column < D)[None, :], other=0.0)
            through_gates = tl.dot(factor, part, input_precision=PRECISION)
            d_live = d_live + (weights[j] * gradient + through_gates - shrink * live[j],)
        for k in range(0, count):
            d_weights = tiles.combine_backward(d_live, updates, d_updates, coefficients, k, tile)
            for j in tl.static_range(STREAMS):
                d_pairs += tl.where(pair[None, :] == k * STREAMS + j, d_weights[j][:, None], 0.0)
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
    STREAMS: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The chunk's part of dW_g^j = Σ_n factor_g X^j, and of the norm's dw = Σ_n dy ⊙ h r."""
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    part = tl.program_id(1).to(tl.int64)
    value = tl.arange(0, PADDED)
    sums = tiles.zeros(STREAMS, (PADDED, WIDTH))
    d_norm = tl.zeros([TOKENS, WIDTH], tl.float32)
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, tokens), TOKENS):
        tile = tiles.tile_at(start + tl.arange(0, TOKENS), column, tokens, D)
        live, _, mixed = _live_tile(updates, coefficients, pre, count, tile, STREAMS)
        place = factors + value[:, None] * tokens + tile.token[None, :]
        factor = tl.load(place, (value < VALUES)[:, None] & tile.present[None, :], other=0.0)
        terms = ()
        for j in tl.static_range(STREAMS):
            terms = terms + (tl.dot(factor, live[j], input_precision=PRECISION),)
        sums = tiles.added(sums, terms)
        if partial_norm is not None:
            d_norm += tiles.load_number(normed, 0, tile)[:, None] * mixed * tiles.load_row(d_h, tile)
    for j in tl.static_range(STREAMS):
        place = partial + ((part * VALUES + value[:, None]) * STREAMS + j) * D + column[None, :]
        tl.store(place, sums[j], (value < VALUES)[:, None] & (column < D)[None, :])
    if partial_norm is not None:
        tiles.store_sums(partial_norm, (d_norm,), column, D)
