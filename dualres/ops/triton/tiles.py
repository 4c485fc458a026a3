"""Tile operations of the kernels: loads, stores, the sum of the live streams, the norm, and their gradients."""
# N tokens  D width  J streams  K updates
# ruff: noqa: N803, N806
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, assignment"

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Tile(NamedTuple):
    """The unit of work of a program: some tokens by some columns of rows (N,D)."""

    tokens: Any  # N
    D: Any  # a constant
    token: Any  # (TOKENS,)
    present: Any  # whether the token exists (TOKENS,)
    column: Any  # (WIDTH,)
    at: Any  # offsets in the rows (TOKENS, WIDTH)
    mask: Any  # (TOKENS, WIDTH)


@triton.jit
def tokens_of_program(TOKENS: tl.constexpr):
    """The tokens of this program (TOKENS,)."""
    return tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)


@triton.jit
def tile_at(token, column, tokens, D: tl.constexpr):
    present = token < tokens
    mask = present[:, None] & (column < D)[None, :]
    return Tile(tokens, D, token, present, column, token[:, None] * D + column[None, :], mask)


@triton.jit
def rows_of_program(tokens, SHAPE: tl.constexpr):
    """The tile of a program that owns whole rows."""
    return tile_at(tokens_of_program(SHAPE.TOKENS), tl.arange(0, SHAPE.WIDTH), tokens, SHAPE.D)


@triton.jit
def load_number(numbers, n, tile, wanted=True):
    """The tile's part of `numbers[n]`, where numbers are (…,N); zeros if not `wanted`."""
    return tl.load(numbers + n * tile.tokens + tile.token, tile.present & wanted, other=0.0)


@triton.jit
def store_number(numbers, n, tile, number, wanted=True):
    tl.store(numbers + n * tile.tokens + tile.token, number, tile.present & wanted)


@triton.jit
def load_stored(stream, tile):
    """The tile of a stream (N,D), as stored."""
    return tl.load(stream + tile.at, tile.mask, other=0.0)


@triton.jit
def load_row(stream, tile):
    """The tile of a stream (N,D), in float32."""
    return load_stored(stream, tile).to(tl.float32)


@triton.jit
def store_row(stream, tile, row):
    tl.store(stream + tile.at, row.to(stream.dtype.element_ty), tile.mask)


@triton.jit
def load_streams(state, tile, STREAMS: tl.constexpr, wanted=True):
    """The streams of a state (J,N,D), as stored; zeros if not `wanted`."""
    streams = ()
    for j in tl.static_range(STREAMS):
        streams = streams + (tl.load(state + j * tile.tokens * tile.D + tile.at, tile.mask & wanted, other=0.0),)
    return streams


@triton.jit
def parameter(pointer, tile):
    """A row of parameters (1, WIDTH): with two axes, so that it gets the layout of the streams it is combined with."""
    return tl.load(pointer + tile.column[None, :], (tile.column < tile.D)[None, :], other=0.0)


@triton.jit
def pick(pointers, index):
    """`pointers[index]` for an index known only at run time."""
    chosen = pointers[0]
    for n in tl.static_range(1, len(pointers)):
        chosen = tl.where(index == n, pointers[n], chosen)
    return chosen


@triton.jit
def row_sums(rows):
    """The sums of rows (TOKENS, WIDTH) over their columns, a tuple of (TOKENS,): one reduction for all of them.

    The warps of a program meet for every reduction, so each costs about as much as a row.
    """
    COUNT: tl.constexpr = len(rows)
    LEVELS: tl.constexpr = (COUNT > 1) + (COUNT > 2) + (COUNT > 4) + (COUNT > 8) + (COUNT > 16) + (COUNT > 32)
    tl.static_assert(COUNT <= 64)
    level = rows
    for _ in tl.static_range((1 << LEVELS) - COUNT):
        level = level + (tl.zeros_like(rows[0]),)
    for _ in tl.static_range(LEVELS):
        pairs = ()
        for n in tl.static_range(len(level) // 2):
            pairs = pairs + (tl.join(level[2 * n], level[2 * n + 1]),)
        level = pairs
    totals = (tl.sum(level[0], 1),)
    for _ in tl.static_range(LEVELS):
        parts = ()
        for n in tl.static_range(len(totals)):
            parts = parts + tl.split(totals[n])
        totals = parts
    return totals[0:COUNT]


@triton.jit
def inverse_rms(square, eps, COUNT: tl.constexpr):
    """1 / √(mean x² + eps) of `COUNT` elements, given the sum of their squares."""
    return tl.rsqrt(square / COUNT + eps)


@triton.jit
def norm_forward(row, norm, eps, tile):
    """The branch's RMSNorm of its input, or the input itself without a norm."""
    if norm is not None:
        row = row * inverse_rms(tl.sum(row * row, 1), eps, tile.D)[:, None] * parameter(norm, tile)
    return row


@triton.jit
def norm_backward(d_y, row, norm, eps, tile):
    """dh = r g − r³ (g·h)/D h with g = w ⊙ dy. -> dh, and its factors r and r³ (g·h)/D"""
    d_row = d_y * parameter(norm, tile)
    square, product = row_sums((row * row, d_row * row))
    r = inverse_rms(square, eps, tile.D)
    shrink = r * r * r * product / tile.D
    return r[:, None] * d_row - shrink[:, None] * row, r, shrink


@triton.jit
def zeros(COUNT: tl.constexpr, shape):
    """A tuple of `COUNT` accumulators."""
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros(shape, tl.float32),)
    return sums


@triton.jit
def added(sums, terms):
    """`sums` + `terms`, elementwise."""
    totals = ()
    for n in tl.static_range(len(sums)):
        totals = totals + (sums[n] + terms[n],)
    return totals


@triton.jit
def store_sums(partial, sums, column, D: tl.constexpr):
    """Store the chunk's sums over its tokens in `partial` (chunks, sums, D)."""
    for n in tl.static_range(len(sums)):
        place = partial + (tl.program_id(1).to(tl.int64) * len(sums) + n) * D + column[None, :]
        tl.store(place, tl.sum(sums[n], 0, keep_dims=True), (column < D)[None, :])


@triton.jit
def combine(given, count, tile, STREAMS: tl.constexpr, STAGES: tl.constexpr = 2):
    """P^j = Σ_k C_k^j u_k with the given updates and coefficients (K,J,N), a tuple over j; () without streams.

    Also the last update, as stored: gradients need it again.
    """
    live, last = zeros(STREAMS, tile.at.shape), ()
    if STREAMS > 0:
        last = tl.zeros(tile.at.shape, given.updates[0].dtype.element_ty)
        for k in tl.range(0, count, num_stages=STAGES):
            last = load_stored(pick(given.updates, k), tile)
            update = last.to(tl.float32)
            terms = ()
            for j in tl.static_range(STREAMS):
                terms = terms + (load_number(given.coefficients, k * STREAMS + j, tile)[:, None] * update,)
            live = added(live, terms)
    return live, last


@triton.jit
def term_backward(d_live, coefficients, k, update, d_update, tile):
    """Back through C_k u_k: stores du_k = Σ_j C_k^j dP^j. -> dC_k^j = u_k · dP^j, a tuple over j; () without u_k"""
    total = tl.zeros(tile.at.shape, tl.float32)
    for j in tl.static_range(len(d_live)):
        total += load_number(coefficients, k * len(d_live) + j, tile)[:, None] * d_live[j].to(tl.float32)
    store_row(d_update, tile, total)
    products = ()
    if update is not None:
        for j in tl.static_range(len(d_live)):
            products = products + (update.to(tl.float32) * d_live[j].to(tl.float32),)
        products = row_sums(products)
    return products
