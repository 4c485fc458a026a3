"""What a branch of mHC reads, on a GPU: two passes over its rows, with the token-wise gates and Sinkhorn between them.

All gates together are a thin matrix product, so tokens and their live streams are processed in tiles;
h = Σ_j H_pre^j X^j = Σ_k w_k u_k with w_k = Σ_j H_pre^j C_k^j is then a sum over the updates.

In the gradient, too, passes over the rows alternate with token-wise kernels: they recompute the gates and the products
of the live streams with the gradients, go back through Sinkhorn to the gradient of every gate value, then compute row
gradients by tiles and weight gradients by chunks of tokens.
"""
# N tokens  D width  J streams  K updates  G gate values: J of H_pre, J of H_post, J·J of H_res
# ruff: noqa: N803, N806
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, assignment"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualres.ops.arguments import HyperReadArguments, Live
from dualres.ops.triton import tiles
from dualres.ops.triton.launch import INTERPRETED, Shape, Tiling, lanes, launch, pointers, rows

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
    weights: Tensor | None  # of the updates in h (K,N), for a forward pass
    pre: Tensor | None = None  # H_pre (J,N), for a backward pass
    potentials: Tensor | None = None  # the log column and row sums that each Sinkhorn step divided by (steps,2,J,N)


class Backward(NamedTuple):
    """Token-wise numbers of the backward pass, all float32."""

    products: Tensor  # dh · X^j (J,N)
    transport: Tensor | None  # d[H_res X]^i · X^j (J,J,N), if that gradient is given
    norm_factors: Tensor  # dh = norm_factors[0] · w ⊙ dy − norm_factors[1] · h (2,N)
    pre: Tensor  # H_pre (J,N)
    matrix: Tensor  # H_res (J,J,N)
    d_logits: Tensor  # dz (G,N)
    factors: Tensor | None = None  # of W in dX, of X in dW (G,N)
    shrinks: Tensor | None = None  # of X in dX, by its norm (N,)


def hyper_read(arguments: HyperReadArguments, results: list[Tensor]) -> None:
    h, next_coefficients = results
    mixing = mix(arguments, join(arguments.gates), next_coefficients, keep=False)
    tokens, count = mixing.scale.numel(), len(arguments.updates)
    assert mixing.weights is not None
    mixed = Live(pointers(arguments.updates), mixing.weights)
    launch(_sum_rows, rows(tokens, h.shape[-1]), mixed, arguments.norm, h, tokens, count, arguments.norm_eps)


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
    precision = "ieee" if torch.version.hip else "tf32x3"  # float32 exactly, or as three products of tf32 parts
    padded = max(16, triton.next_power_of_2(values))
    shape = Shape(width, tile_tokens, tile_width, streams, values, padded, precision)
    return Tiling((triton.cdiv(tokens, tile_tokens),), warps, shape)


def mix(arguments: HyperReadArguments, gates: Gates, next_coefficients: Tensor, keep: bool) -> Mixing:
    """The gates of every token and its next coefficients; `keep` stores what a backward pass needs."""
    coefficients = arguments.coefficients
    count, streams = coefficients.shape[:2]
    tokens, new = coefficients[0, 0].numel(), coefficients.new_empty
    mixing = Mixing(
        projected=new(len(gates.bias), tokens),
        scale=new(tokens),
        next_coefficients=next_coefficients,
        weights=None if keep else new(count, tokens),
        pre=new(streams, tokens) if keep else None,
        potentials=new(arguments.steps, 2, streams, tokens) if keep else None,
    )
    given, projections = Live(pointers(arguments.updates), coefficients), (mixing.projected, mixing.scale)
    launch(_project, matrix_tiles(tokens, gates), given, gates.weight, projections, tokens, count, arguments.eps)
    launch(_mix, lanes(tokens, streams), coefficients, gates, mixing, tokens, count, arguments.steps)
    return mixing


@triton.jit(do_not_specialize=["tokens", "count"])
def _project(given, weight, projections, tokens: tl.int64, count, eps, SHAPE: tl.constexpr):
    """x W of all gate values, and the inverse norm of [X⁰; X¹; …]."""
    projected, scales = projections
    token = tiles.tokens_of_program(SHAPE.TOKENS)
    present = token < tokens
    value = tl.arange(0, SHAPE.PADDED)
    total = tl.zeros([SHAPE.TOKENS, SHAPE.PADDED], tl.float32)
    squares = tl.zeros([SHAPE.TOKENS], tl.float32)
    for start in range(0, SHAPE.D, SHAPE.WIDTH):
        column = start + tl.arange(0, SHAPE.WIDTH)
        streams, _ = tiles.combine(given, count, tiles.tile_at(token, column, tokens, SHAPE.D), SHAPE.STREAMS)
        for j in tl.static_range(SHAPE.STREAMS):
            squares += tl.sum(streams[j] * streams[j], 1)
            place = weight + (value[None, :] * SHAPE.STREAMS + j) * SHAPE.D + column[:, None]
            part = tl.load(place, (value < SHAPE.VALUES)[None, :] & (column < SHAPE.D)[:, None], other=0.0)
            total = tl.dot(streams[j], part, total, input_precision=SHAPE.PRECISION)
    tl.store(scales + token, tl.rsqrt(squares / (SHAPE.STREAMS * SHAPE.D) + eps), present)
    place = projected + value[None, :] * tokens + token[:, None]
    tl.store(place, total, present[:, None] & (value < SHAPE.VALUES)[None, :])


class Lanes(NamedTuple):
    """The matrices of a program's tokens, (PADDED, PADDED, TOKENS): entries with i or j ≥ STREAMS are padding."""

    tokens: Any  # N
    i: Any
    j: Any
    token: Any
    present: Any
    of_row: Any  # whether the token and the row exist
    of_column: Any
    inverse: Any  # the inverse norm of the live streams


@triton.jit
def lanes_of_program(mixing, tokens, SHAPE: tl.constexpr):
    i, j = tl.arange(0, SHAPE.PADDED)[:, None, None], tl.arange(0, SHAPE.PADDED)[None, :, None]
    token = tiles.tokens_of_program(SHAPE.TOKENS)
    present = token < tokens
    inverse = tl.load(mixing.scale + token, present, other=0.0)[None, None, :]
    token, present = token[None, None, :], present[None, None, :]
    return Lanes(tokens, i, j, token, present, present & (i < SHAPE.STREAMS), present & (j < SHAPE.STREAMS), inverse)


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
def _mix(coefficients, gates, mixing, tokens: tl.int64, count, steps, SHAPE: tl.constexpr):
    """[H_res C, H_post] and Σ_j H_pre^j C^j. Sinkhorn by its potentials: log H_res = z − f_i − g_j, where the
    columns give g = lse_i(z − f), then the rows f = lse_j(z − g)."""
    STREAMS: tl.constexpr = SHAPE.STREAMS
    lanes = lanes_of_program(mixing, tokens, SHAPE)
    i, j, token, of_row, of_column = lanes.i, lanes.j, lanes.token, lanes.of_row, lanes.of_column
    z = mixing_logits(gates, mixing, lanes, STREAMS)
    f = tl.zeros([SHAPE.PADDED, 1, SHAPE.TOKENS], tl.float32)
    g = tl.zeros([1, SHAPE.PADDED, SHAPE.TOKENS], tl.float32)
    for step in range(0, steps):
        g = _log_sum_exp(z - f, 0)
        f = _log_sum_exp(z - g, 1)
        if mixing.potentials is not None:
            tl.store(mixing.potentials + (step * 2 * STREAMS + j) * tokens + token, g, of_column)
            tl.store(mixing.potentials + (step * 2 * STREAMS + STREAMS + i) * tokens + token, f, of_row)
    matrix = tl.exp(z - f - g)
    pre = tl.sigmoid(gate_logits(gates, mixing, j, lanes, of_column))
    if mixing.pre is not None:
        tl.store(mixing.pre + j * tokens + token, pre, of_column)
    for k in range(0, count):
        c = tl.load(coefficients + (k * STREAMS + j) * tokens + token, of_column, other=0.0)
        mixed_coefficient = tl.sum(matrix * c, 1, keep_dims=True)
        tl.store(mixing.next_coefficients + (k * STREAMS + i) * tokens + token, mixed_coefficient, of_row)
        if mixing.weights is not None:
            tl.store(mixing.weights + k * tokens + token, tl.sum(pre * c, 1, keep_dims=True), lanes.present)
    post = tl.sigmoid(gate_logits(gates, mixing, STREAMS + j, lanes, of_column))
    tl.store(mixing.next_coefficients + (count * STREAMS + j) * tokens + token, 2 * post, of_column)


@triton.jit(do_not_specialize=["tokens", "count"])
def _sum_rows(given, norm, h, tokens: tl.int64, count, norm_eps, SHAPE: tl.constexpr):
    """h = Norm(Σ_k w_k u_k)."""
    tile = tiles.rows_of_program(tokens, SHAPE)
    mixed, _ = tiles.combine(given, count, tile, 1)
    tiles.store_row(h, tile, tiles.norm_forward(mixed[0], norm, norm_eps, tile))


def hyper_read_backward(
    d_h: Tensor, d_next: Tensor, d_live: Tensor | None, arguments: HyperReadArguments, gradients: HyperReadArguments
) -> None:
    coefficients, norm, gates = arguments.coefficients, arguments.norm, join(arguments.gates)
    count, streams = coefficients.shape[:2]
    mixing = mix(arguments, gates, torch.empty_like(d_next), keep=True)
    assert mixing.pre is not None
    tokens, width, new = mixing.scale.numel(), d_h.shape[-1], mixing.scale.new_empty
    incoming, given = (d_h, d_live), Live(pointers(arguments.updates), coefficients)
    d_given = Live(pointers(gradients.updates), gradients.coefficients, gradients.carrier)
    numbers = Backward(
        products=new(streams, tokens),
        transport=None if d_live is None else new(streams, streams, tokens),
        norm_factors=new(2, tokens),
        pre=mixing.pre,
        matrix=new(streams, streams, tokens),
        d_logits=torch.empty_like(mixing.projected),
    )
    tiling = rows(tokens, width, streams, streams)
    launch(_products, tiling, incoming, given, norm, numbers, tokens, count, arguments.norm_eps)
    tiling, d_coefficients = lanes(tokens, streams), (d_next, gradients.coefficients)
    launch(_mix_backward, tiling, coefficients, d_coefficients, gates, mixing, numbers, tokens, count, arguments.steps)
    factors = numbers.d_logits * mixing.scale * gates.scale[:, None]
    shrinks = (factors * mixing.projected).sum(0) * mixing.scale.square() / (streams * width)
    numbers = numbers._replace(factors=factors, shrinks=shrinks)
    tiling, pairs = matrix_tiles(tokens, gates), triton.next_power_of_2(max(1, len(gradients.updates) * streams))
    given_rows = (incoming, given, d_given, gates.weight, norm, numbers)
    launch(_row_gradients, tiling, *given_rows, tokens, count, arguments.carried, PAIRS=pairs)
    tiling = tiling.by_columns(tokens)
    partial = new(tiling.grid[1], *gates.weight.shape)
    partial_norm = None if norm is None else new(tiling.grid[1], width)
    launch(_weight_gradients, tiling, d_h, given, numbers, partial, partial_norm, tokens, count, tiling.chunk)
    sizes = [len(d_bias) for d_bias in gradients.gates[2::3]]
    d_scales = (numbers.d_logits * mixing.scale * mixing.projected).split(sizes)
    parts = zip(partial.split(sizes, 1), d_scales, numbers.d_logits.split(sizes), strict=True)
    for n, (d_weight, d_scale, d_bias) in enumerate(parts):
        torch.sum(d_weight, 0, out=gradients.gates[3 * n])
        torch.sum(d_scale, (0, 1), out=gradients.gates[3 * n + 1][0])
        torch.sum(d_bias, 1, out=gradients.gates[3 * n + 2])
    if partial_norm is not None:
        torch.sum(partial_norm, 0, out=gradients.norm)


@triton.jit(do_not_specialize=["tokens", "count"])
def _products(incoming, given, norm, numbers, tokens: tl.int64, count, norm_eps, SHAPE: tl.constexpr):
    """dh · X^j, with dh before the branch's norm, and the two factors of `norm_backward`; d[H_res X]^i · X^j."""
    d_h, d_live = incoming
    tile = tiles.rows_of_program(tokens, SHAPE)
    live, _, _, mixed = _live_tile(given, numbers.pre, count, tile, SHAPE.STREAMS)
    gradient = tiles.load_row(d_h, tile)
    if norm is not None:
        gradient, r, norm_shrink = tiles.norm_backward(gradient, mixed, norm, norm_eps, tile)
        tiles.store_number(numbers.norm_factors, 0, tile, r)
        tiles.store_number(numbers.norm_factors, 1, tile, norm_shrink)
    _store_products(numbers.products, gradient, live, tile)
    if d_live is not None:
        for i in range(0, SHAPE.STREAMS):
            row = tiles.load_row(d_live + i * tokens * SHAPE.D, tile)
            _store_products(numbers.transport + i * SHAPE.STREAMS * tokens, row, live, tile)


@triton.jit
def _store_products(numbers, row, streams, tile):
    """Stores row · x^j, for every stream."""
    terms = ()
    for j in tl.static_range(len(streams)):
        terms = terms + (row * streams[j],)
    dots = tiles.row_sums(terms)
    for j in tl.static_range(len(streams)):
        tiles.store_number(numbers, j, tile, dots[j])


@triton.jit(do_not_specialize=["tokens", "count", "steps"])
def _mix_backward(coefficients, gradients, gates, mixing, numbers, tokens: tl.int64, count, steps, SHAPE: tl.constexpr):
    """dz of every gate value, H_res, and the part of dC through H_res C.

    Half a Sinkhorn step, L' = L − lse(L), has dL = dL' − exp(L') Σ dL': it needs only L', computed from the potentials.
    """
    d_next, d_coefficients = gradients
    STREAMS: tl.constexpr = SHAPE.STREAMS
    lanes = lanes_of_program(mixing, tokens, SHAPE)
    i, j, token, of_row, of_column = lanes.i, lanes.j, lanes.token, lanes.of_row, lanes.of_column
    z = mixing_logits(gates, mixing, lanes, STREAMS)
    last = mixing.potentials + (steps - 1) * 2 * STREAMS * tokens
    g = tl.load(last + j * tokens + token, of_column, other=0.0)
    f = tl.load(last + (STREAMS + i) * tokens + token, of_row, other=0.0)
    matrix = tl.exp(z - f - g)
    place, real = (i * STREAMS + j) * tokens + token, of_row & (j < STREAMS)
    tl.store(numbers.matrix + place, matrix, real)
    d_matrix = tl.zeros([SHAPE.PADDED, SHAPE.PADDED, SHAPE.TOKENS], tl.float32)
    if numbers.transport is not None:
        d_matrix = tl.load(numbers.transport + place, real, other=0.0)
    for k in range(0, count):
        c = tl.load(coefficients + (k * STREAMS + j) * tokens + token, of_column, other=0.0)
        d_moved = tl.load(d_next + (k * STREAMS + i) * tokens + token, of_row, other=0.0)
        d_matrix += d_moved * c
        d_c = tl.sum(matrix * d_moved, 0, keep_dims=True)
        tl.store(d_coefficients + (k * STREAMS + j) * tokens + token, d_c, of_column)
    gate = tl.load(numbers.pre + j * tokens + token, of_column, other=0.0)
    d_pre = tl.load(numbers.products + j * tokens + token, of_column, other=0.0)
    tl.store(numbers.d_logits + j * tokens + token, d_pre * gate * (1 - gate), of_column)
    gate = tl.sigmoid(gate_logits(gates, mixing, STREAMS + j, lanes, of_column))
    d_post = tl.load(d_next + (count * STREAMS + j) * tokens + token, of_column, other=0.0)
    tl.store(numbers.d_logits + (STREAMS + j) * tokens + token, d_post * 2 * gate * (1 - gate), of_column)
    d_z = d_matrix * matrix
    for back in range(0, steps):
        step = steps - 1 - back
        d_z -= tl.exp(z - f - g) * tl.sum(d_z, 1, keep_dims=True)
        before = mixing.potentials + (step - 1) * 2 * STREAMS * tokens
        f = tl.load(before + (STREAMS + i) * tokens + token, of_row & (step > 0), other=0.0)
        d_z -= tl.exp(z - f - g) * tl.sum(d_z, 0, keep_dims=True)
        g = tl.load(before + j * tokens + token, of_column & (step > 0), other=0.0)
    tl.store(numbers.d_logits + 2 * STREAMS * tokens + place, d_z, real)


@triton.jit
def _live_tile(given, pre, count, tile, STREAMS: tl.constexpr):
    """The live streams X^j and the last update; H_pre^j; and Σ_j H_pre^j X^j, which is h before the norm."""
    live, last = tiles.combine(given, count, tile, STREAMS)
    weights, mixed = (), tl.zeros(tile.at.shape, tl.float32)
    for j in tl.static_range(STREAMS):
        weight = tiles.load_number(pre, j, tile)[:, None]
        weights = weights + (weight,)
        mixed += weight * live[j]
    return live, last, weights, mixed


@triton.jit(do_not_specialize=["tokens", "count", "carried"])
def _row_gradients(
    incoming,
    given,
    d_given,
    weight,
    norm,
    numbers,
    tokens: tl.int64,
    count,
    carried,
    PAIRS: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """dX^j = H_pre^j dh + Σ_g factor_g W_g^j − shrink · X^j + Σ_i H_res^ij d[H_res X]^i.

    For k ≥ `carried` also du_k = Σ_j C_k^j dX^j and dC_k^j += u_k · dX^j.
    """
    d_h, d_moved = incoming
    STREAMS: tl.constexpr = SHAPE.STREAMS
    token = tiles.tokens_of_program(SHAPE.TOKENS)
    present = token < tokens
    value, pair = tl.arange(0, SHAPE.PADDED), tl.arange(0, PAIRS)
    place = numbers.factors + value[None, :] * tokens + token[:, None]
    factor = tl.load(place, present[:, None] & (value < SHAPE.VALUES)[None, :], other=0.0)
    shrink = tl.load(numbers.shrinks + token, present, other=0.0)[:, None]
    d_pairs = tl.zeros([SHAPE.TOKENS, PAIRS], tl.float32)
    for start in range(0, SHAPE.D, SHAPE.WIDTH):
        column = start + tl.arange(0, SHAPE.WIDTH)
        tile = tiles.tile_at(token, column, tokens, SHAPE.D)
        d_live = ()  # what needs the live streams comes last, so that fewer rows are in registers at a time
        for j in tl.static_range(STREAMS):
            weight_at = weight + (value[:, None] * STREAMS + j) * SHAPE.D + column[None, :]
            part = tl.load(weight_at, (value < SHAPE.VALUES)[:, None] & (column < SHAPE.D)[None, :], other=0.0)
            d_live = d_live + (tl.dot(factor, part, input_precision=SHAPE.PRECISION),)
        if d_moved is not None:
            for i in range(0, STREAMS):
                row = tiles.load_row(d_moved + i * tokens * SHAPE.D, tile)
                terms = ()
                for j in tl.static_range(STREAMS):
                    terms = terms + (tiles.load_number(numbers.matrix, i * STREAMS + j, tile)[:, None] * row,)
                d_live = tiles.added(d_live, terms)
        live, last, weights, mixed = _live_tile(given, numbers.pre, count, tile, STREAMS)
        gradient = tiles.load_row(d_h, tile)
        if norm is not None:
            r = tiles.load_number(numbers.norm_factors, 0, tile)[:, None]
            norm_shrink = tiles.load_number(numbers.norm_factors, 1, tile)[:, None]
            gradient = r * tiles.parameter(norm, tile) * gradient - norm_shrink * mixed
        terms = ()
        for j in tl.static_range(STREAMS):
            terms = terms + (weights[j] * gradient - shrink * live[j],)
        d_live = tiles.added(d_live, terms)
        if d_given.carrier is not None:
            for j in tl.static_range(STREAMS):
                tiles.store_row(d_given.carrier + j * tokens * SHAPE.D, tile, d_live[j])
        if len(d_given.updates) > 0:
            for k in range(carried, count - 1):
                update = tiles.load_stored(tiles.pick(given.updates, k), tile)
                d_pairs += _term_backward(d_live, given, d_given, k, carried, update, pair, tile)
            d_pairs += _term_backward(d_live, given, d_given, count - 1, carried, last, pair, tile)
    if len(d_given.updates) > 0:
        # Offsets are computed anew: `token` would occupy registers throughout the loop.
        first = d_given.coefficients + tl.program_id(0).to(tl.int64) * SHAPE.TOKENS
        place = first + ((carried * STREAMS + pair)[None, :] * tokens + tl.arange(0, SHAPE.TOKENS)[:, None])
        known = present[:, None] & (pair < (count - carried) * STREAMS)[None, :]
        tl.store(place, tl.load(place, known, other=0.0) + d_pairs, known)


@triton.jit
def _term_backward(d_live, given, d_given, k, carried, update, pair, tile):
    """Back through C_k u_k. -> the tile's part of dC_k, in its places of (TOKENS, PAIRS)"""
    d_update = tiles.pick(d_given.updates, k - carried)
    d_weights = tiles.term_backward(d_live, given.coefficients, k, update, d_update, tile)
    d_pairs = tl.zeros([tile.at.shape[0], pair.shape[0]], tl.float32)
    for j in tl.static_range(len(d_live)):
        d_pairs += tl.where(pair[None, :] == (k - carried) * len(d_live) + j, d_weights[j][:, None], 0.0)
    return d_pairs


@triton.jit(do_not_specialize=["tokens", "count", "chunk"])
def _weight_gradients(d_h, given, numbers, partial, partial_norm, tokens: tl.int64, count, chunk, SHAPE: tl.constexpr):
    """The chunk's part of dW_g^j = Σ_n factor_g X^j, and of the norm's dw = Σ_n dy ⊙ h r."""
    column = tl.program_id(0) * SHAPE.WIDTH + tl.arange(0, SHAPE.WIDTH)
    part = tl.program_id(1).to(tl.int64)
    value = tl.arange(0, SHAPE.PADDED)
    sums = tiles.zeros(SHAPE.STREAMS, (SHAPE.PADDED, SHAPE.WIDTH))
    d_norm = tl.zeros([SHAPE.TOKENS, SHAPE.WIDTH], tl.float32)
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, tokens), SHAPE.TOKENS):
        tile = tiles.tile_at(start + tl.arange(0, SHAPE.TOKENS), column, tokens, SHAPE.D)
        live, _, _, mixed = _live_tile(given, numbers.pre, count, tile, SHAPE.STREAMS)
        place = numbers.factors + value[:, None] * tokens + tile.token[None, :]
        factor = tl.load(place, (value < SHAPE.VALUES)[:, None] & tile.present[None, :], other=0.0)
        terms = ()
        for j in tl.static_range(SHAPE.STREAMS):
            terms = terms + (tl.dot(factor, live[j], input_precision=SHAPE.PRECISION),)
        sums = tiles.added(sums, terms)
        if partial_norm is not None:
            d_norm += tiles.load_number(numbers.norm_factors, 0, tile)[:, None] * mixed * tiles.load_row(d_h, tile)
    for j in tl.static_range(SHAPE.STREAMS):
        place = partial + ((part * SHAPE.VALUES + value[:, None]) * SHAPE.STREAMS + j) * SHAPE.D + column[None, :]
        tl.store(place, sums[j], (value < SHAPE.VALUES)[:, None] & (column < SHAPE.D)[None, :])
    if partial_norm is not None:
        tiles.store_sums(partial_norm, (d_norm,), column, SHAPE.D)
