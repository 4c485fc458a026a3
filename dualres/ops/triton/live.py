"""Reads (phase 2) and writes of the live streams on a GPU, and their gradients.

A read is one pass that loads each of its rows once. So is its gradient: it recomputes a token's rows, writes all row
gradients, and keeps the weights' gradients of a chunk of tokens in registers; the chunks are summed without atomics. If
rows are too wide for that, it writes token-wise factors instead, and a second kernel multiplies the rows by them.

Registers are the limit, so the gradient's code follows the compilers: they delay sums that nothing waits for, and so
keep all rows to the end, and load all weights at once. Neither happens across a loop, even one that runs once.
"""
# N tokens  D width  J stored streams  O output streams  K updates  G gate values
# ruff: noqa: N803, N806
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, assignment, misc"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualres.ops import traffic
from dualres.ops.arguments import Live, ReadArguments, WriteArguments
from dualres.ops.triton import tiles
from dualres.ops.triton.launch import columns, lanes, launch, pointers, route, rows


def read(arguments: ReadArguments, results: list[Tensor]) -> None:
    tokens, width = arguments.log_partition[0].numel(), results[0].shape[-1]
    tiling, count = rows(tokens, width, streams=live_count(arguments)), len(arguments.updates)
    launch(_read, tiling, pack(arguments), tuple(results), tokens, count, **route(arguments))


def live_count(arguments: ReadArguments) -> int:
    """The number of live streams."""
    return 0 if arguments.coefficients is None else arguments.coefficients.shape[1]


def pack(arguments: ReadArguments) -> Any:
    """The arguments as a kernel takes them: lists as tuples, without the route, which is constant, and carriers."""
    replaced: Any = dict.fromkeys(("retrieved_carrier", "carrier", "key", "value", "carried"))
    replaced.update(updates=pointers(arguments.updates), gates=tuple(arguments.gates))
    return arguments._replace(**replaced)


class GateTile(NamedTuple):
    """One gate for a tile's tokens; tuples over the gate's values."""

    scale: Any  # the inverse norm of its input streams
    projected: Any  # x W
    outputs: Any  # σ(gate scale · x̄ W + bias)


class Forward(NamedTuple):
    """What a read computes for a tile; tuples over streams, empty without a live state or gates."""

    stored: Any  # h̃, as stored
    live: Any  # P
    last: Any  # the last update, as stored
    masses: Any  # λ
    logits: Any  # a
    key_scales: Any  # the inverse norms of the keys
    rho: Any
    streams: Any  # h̃ and the live state merged
    alpha: Any
    beta: Any  # β / 2: a `GateTile` without the factor 2
    mixed: Any  # what the branch reads, before its norm


@triton.jit
def projections(streams, weight, COUNT: tl.constexpr, tile):
    """Rows whose sums are Σ_j x^j · W_g^j, for `COUNT` gate values."""
    projected = ()
    for g in tl.static_range(COUNT):
        row = streams[0] * tiles.parameter(weight + g * len(streams) * tile.D, tile)
        for j in tl.static_range(1, len(streams)):
            row += streams[j] * tiles.parameter(weight + (g * len(streams) + j) * tile.D, tile)
        projected = projected + (row,)
    return projected


@triton.jit
def open_gate(scale, projected, parameters):
    """The `GateTile` with these parameters: weight, scale, bias."""
    outputs = ()
    for g in tl.static_range(len(projected)):
        z = tl.load(parameters[1]) * scale * projected[g] + tl.load(parameters[2] + g)
        outputs = outputs + (tl.sigmoid(z),)
    return GateTile(scale, projected, outputs)


@triton.jit
def merge(stored, live, masses, VALUE: tl.constexpr):
    """λ h̃ + (1 − λ) v for every output stream; h̃ alone without a live state."""
    streams = ()
    for o in tl.static_range(len(VALUE)):
        row = stored[o].to(tl.float32)
        if len(live) > 0:
            row = masses[o][:, None] * row + (1 - masses[o])[:, None] * live[VALUE[o]]
        streams = streams + (row,)
    return streams


@triton.jit
def forward(
    arguments, count, tile, KEY: tl.constexpr, VALUE: tl.constexpr, STREAMS: tl.constexpr, STAGES: tl.constexpr
):
    """λ = σ(ζ − a), the merged streams, their α and β, and the branch input."""
    stored = tiles.load_streams(arguments.retrieved, tile, len(KEY))
    live, last = tiles.combine(arguments, count, tile, STREAMS, STAGES)
    masses, logits, key_scales, rho = (), (), (), ()
    if STREAMS > 0:
        terms = ()
        for j in tl.static_range(STREAMS):
            terms = terms + (live[j] * live[j],)
        for o in tl.static_range(len(KEY)):
            terms = terms + (live[KEY[o]] * tiles.parameter(arguments.query + o * tile.D, tile),)
        if len(arguments.gates) > 0:
            terms = terms + projections(live, arguments.gates[6], 1, tile)
        numbers = tiles.row_sums(terms)
        for o in tl.static_range(len(KEY)):
            scale = tiles.inverse_rms(numbers[KEY[o]], arguments.eps, tile.D)
            logit = numbers[STREAMS + o] * scale
            mass = tl.sigmoid(tiles.load_number(arguments.log_partition, o, tile) - logit)
            masses, logits, key_scales = masses + (mass,), logits + (logit,), key_scales + (scale,)
        if len(arguments.gates) > 0:
            scale = tiles.inverse_rms(numbers[0] + numbers[1], arguments.eps, 2 * tile.D)
            rho = open_gate(scale, numbers[4:5], arguments.gates[6:9])
    streams = merge(stored, live, masses, VALUE)
    alpha, beta, mixed = (), (), streams[0]
    if len(arguments.gates) > 0:
        square = streams[0] * streams[0] + streams[1] * streams[1]
        numbers = tiles.row_sums(projections(streams, arguments.gates[0], 2, tile) + (square,))
        scale = tiles.inverse_rms(numbers[2], arguments.eps, 2 * tile.D)
        alpha = open_gate(scale, numbers[0:2], arguments.gates[0:3])
        numbers = tiles.row_sums(projections(streams, arguments.gates[3], 2, tile))
        beta = open_gate(scale, numbers, arguments.gates[3:6])
        mixed = alpha.outputs[0][:, None] * streams[0] + alpha.outputs[1][:, None] * streams[1]
    return Forward(stored, live, last, masses, logits, key_scales, rho, streams, alpha, beta, mixed)


@triton.jit
def load_pair(coefficients, k, tile, wanted=True):
    """`coefficients[k]` of two streams; zeros if not `wanted`."""
    zeroth = tiles.load_number(coefficients, 2 * k, tile, wanted)
    return zeroth, tiles.load_number(coefficients, 2 * k + 1, tile, wanted)


@triton.jit
def store_pair(coefficients, k, tile, pair, wanted=True):
    tiles.store_number(coefficients, 2 * k, tile, pair[0], wanted)
    tiles.store_number(coefficients, 2 * k + 1, tile, pair[1], wanted)


@triton.jit
def transported(pair, rho):
    """M(ρ) C_k with M = [[ρ, 1-ρ], [1-ρ, ρ]], which is symmetric."""
    return rho * pair[0] + (1 - rho) * pair[1], (1 - rho) * pair[0] + rho * pair[1]


@triton.jit(do_not_specialize=["tokens", "count"])
def _read(arguments, results, tokens: tl.int64, count, KEY: tl.constexpr, VALUE: tl.constexpr, SHAPE: tl.constexpr):
    """`reference.gated_read`, or `reference.read` without gates."""
    h, next_coefficients = results
    tile = tiles.rows_of_program(tokens, SHAPE)
    result = forward(arguments, count, tile, KEY, VALUE, SHAPE.STREAMS, 2)
    if len(arguments.gates) > 0:
        for j in tl.static_range(2):
            tiles.store_number(next_coefficients, 2 * count + j, tile, 2 * result.beta.outputs[j])
        if SHAPE.STREAMS > 0:
            for k in range(0, count):
                moved = transported(load_pair(arguments.coefficients, k, tile), result.rho.outputs[0])
                store_pair(next_coefficients, k, tile, moved)
    tiles.store_row(h, tile, tiles.norm_forward(result.mixed, arguments.norm, arguments.norm_eps, tile))


class Incoming(NamedTuple):
    """The gradients that the backward pass of a read takes."""

    h: Any
    next_coefficients: Any
    live: Any  # of the transported live streams, or None
    retrieved: Any  # of the retrieved states by their later readers, or None


class Factors(NamedTuple):
    """Tuples of the token-wise factors of rows in the gradients of the weights, or how many there are."""

    masses: Any  # of h̃ in a stream (O)
    projected: Any  # of the streams in dW (G)
    scored: Any  # of the keys in dq (O)
    mixing: Any  # of the streams in h, times the inverse norm of h (O)


class Sums(NamedTuple):
    """Tuples of the rows of the weights' gradients, summed over tokens, or how many there are."""

    gates: Any  # dW_α and dW_β, each 2×2
    rho: Any  # dW_ρ (2)
    query: Any  # dq (O)
    norm: Any  # dw (1)


class GateNumbers(NamedTuple):
    """Token-wise numbers of the gates in the backward pass."""

    d_scales: Tensor  # ds of each gate (gates,N)
    d_biases: Tensor  # dz (G,N)
    rho: Tensor | None  # ρ, if there is a live state (N,)


def read_backward(
    d_h: Tensor,
    d_next: Tensor,
    d_live: Tensor | None,
    d_retrieved: Tensor | None,
    arguments: ReadArguments,
    gradients: ReadArguments,
) -> None:
    new, gates, streams = arguments.log_partition.new_empty, gradients.gates, live_count(arguments)
    tokens, count, width = d_h[..., 0].numel(), len(arguments.updates), d_h.shape[-1]
    values = [len(d_bias) for d_bias in gates[2::3]]
    rho = new(tokens) if gates and count else None
    numbers = GateNumbers(new(len(values), tokens), new(sum(values), tokens), rho)
    incoming, packed, constants = Incoming(d_h, d_next, d_live, d_retrieved), pack(arguments), route(arguments)
    outgoing = pack(gradients._replace(query=None, gates=[], norm=None))
    outgoing = outgoing._replace(updates=tuple(gradients.updates), carrier=gradients.carrier)
    d_weights = [d.view(-1, width) for d in (*gates[0::3], gradients.query, gradients.norm) if d is not None]
    sizes = list(map(len, d_weights))
    keyed, normed = len(arguments.key) if count else 0, gradients.norm is not None
    sums = Sums(8 if gates else 0, 2 if rho is not None else 0, keyed, int(normed))
    heights = Factors(keyed, sum(values), keyed, len(arguments.key) if normed else 0)
    tiling = rows(tokens, width, streams=streams).by_columns(tokens)
    one_pass = traffic.one_pass(width, len(gates) > 0)
    partial = new(tiling.grid[1], sum(sizes), width) if one_pass else None
    factors = None if one_pass else new(sum(heights), tokens)
    results, kept = (outgoing, numbers, partial, factors), sums if one_pass else Sums(0, 0, 0, 0)
    launch(_read_backward, tiling, incoming, packed, results, tokens, count, tiling.chunk, 1, **constants, SUMS=kept)
    if partial is None:
        tiling = columns(tokens, width, sum(sizes), streams)
        partial = new(tiling.grid[1], sum(sizes), width)
        given, constants = (d_h, packed, factors, partial), {**constants, "HEIGHTS": heights, "SUMS": sums}
        launch(_weight_gradients, tiling, *given, tokens, count, tiling.chunk, **constants)
    if rho is not None:
        given = (d_next, rho, gradients.coefficients)
        launch(_transport_backward, lanes(tokens), *given, tokens, count, arguments.carried)
    for d_weight, parts in zip(d_weights, partial.split(sizes, 1), strict=True):
        torch.sum(parts, 0, out=d_weight)
    for n, (d_scale, d_bias) in enumerate(zip(numbers.d_scales, numbers.d_biases.split(values), strict=True)):
        torch.sum(d_scale, 0, keepdim=True, out=gates[3 * n + 1])
        torch.sum(d_bias, 1, out=gates[3 * n + 2])


@triton.jit
def _gate_backward(dz, gate, gates, numbers, INDEX: tl.constexpr, tile):
    """Back through z = s · m · e + bias with e = x W: stores the gate's ds, and dz of every gate value.

    -> dz · s · m, a tuple over the gate values: the factor of W in dx and of x in dW; and the norm's factor of x in dx
    """
    d_projected, total = (), tl.zeros_like(gate.scale)
    gate_scale = tl.load(gates[3 * INDEX + 1])
    for g in tl.static_range(len(dz)):
        d_projected = d_projected + (dz[g] * gate_scale * gate.scale,)
        total += dz[g] * gate.scale * gate.projected[g]
        tiles.store_number(numbers.d_biases, 2 * INDEX + g, tile, dz[g])
    tiles.store_number(numbers.d_scales, INDEX, tile, total)
    return d_projected, total * gate_scale


@triton.jit
def zero_sums(SUMS: tl.constexpr, SHAPE: tl.constexpr):
    return Sums(
        tiles.zeros(SUMS[0], (SHAPE.TOKENS, SHAPE.WIDTH)),
        tiles.zeros(SUMS[1], (SHAPE.TOKENS, SHAPE.WIDTH)),
        tiles.zeros(SUMS[2], (SHAPE.TOKENS, SHAPE.WIDTH)),
        tiles.zeros(SUMS[3], (SHAPE.TOKENS, SHAPE.WIDTH)),
    )


@triton.jit
def scaled(factors, number):
    """Every factor × `number`."""
    multiples = ()
    for n in tl.static_range(len(factors)):
        multiples = multiples + (factors[n] * number,)
    return multiples


@triton.jit
def gate_terms(factors, streams):
    """Terms of dW: every factor × every stream."""
    terms = ()
    for n in tl.static_range(len(factors)):
        for j in tl.static_range(len(streams)):
            terms = terms + (factors[n][:, None] * streams[j],)
    return terms


@triton.jit
def query_terms(scored, live, KEY: tl.constexpr):
    """Terms of dq: the keys of every output stream."""
    terms = ()
    for o in tl.static_range(len(scored)):
        terms = terms + (scored[o][:, None] * live[KEY[o]],)
    return terms


@triton.jit
def norm_term(mixing, streams, d_h):
    """The term of dw: dy ⊙ h r."""
    row = mixing[0][:, None] * streams[0]
    for o in tl.static_range(1, len(streams)):
        row += mixing[o][:, None] * streams[o]
    return (row * d_h,)


@triton.jit
def _term_backward(d_live, arguments, gradients, k, at, update, tile):
    """Back through C_k u_k, whose update has its gradient `at` this place."""
    d_update = tiles.pick(gradients.updates, at)
    if len(arguments.gates) > 0:
        d_weights = tiles.term_backward(d_live, arguments.coefficients, k, update, d_update, tile)
        store_pair(gradients.coefficients, k, tile, d_weights)
    else:  # the coefficients are constants
        tiles.term_backward(d_live, arguments.coefficients, k, None, d_update, tile)


@triton.jit
def backward(sums, given, count, once, tile, KEY: tl.constexpr, VALUE: tl.constexpr, SHAPE: tl.constexpr):
    """Stores the gradients of all rows and token-wise numbers of a tile.

    -> the sums of the weights' gradients with the tile's terms, and the factors of its rows in them
    """
    incoming, arguments, gradients, numbers = given
    D: tl.constexpr = SHAPE.D
    STREAMS: tl.constexpr = SHAPE.STREAMS
    gates, d_next = arguments.gates, incoming.next_coefficients
    d_rho = tl.zeros(tile.token.shape, tl.float32)
    if STREAMS > 0 and len(gates) > 0:  # a loop among the rows would lengthen their lives
        for k in range(0, count):
            pair, d_pair = load_pair(arguments.coefficients, k, tile), load_pair(d_next, k, tile)
            d_rho += (d_pair[0] - d_pair[1]) * (pair[0] - pair[1])
    result = forward(arguments, count, tile, KEY, VALUE, STREAMS, 1)  # the sums leave no registers for loads ahead
    live, streams = result.live, result.streams
    projected, scored, mixing = (), (), ()
    gate_sums, rho_sums, query_sums, norm_sums = sums
    # through the norm of the branch
    d_h = tiles.load_row(incoming.h, tile)
    d_mixed = d_h
    if arguments.norm is not None:
        d_mixed, r, _ = tiles.norm_backward(d_h, result.mixed, arguments.norm, arguments.norm_eps, tile)
        for o in tl.static_range(len(KEY)):
            mixing = mixing + (result.alpha.outputs[o] * r if len(gates) > 0 else r,)
    # through α and β
    d_streams = (d_mixed,)
    if len(gates) > 0:
        alpha, half_beta, scale = result.alpha.outputs, result.beta.outputs, result.alpha.scale
        d_alpha, d_beta = (), ()
        dots = tiles.row_sums((d_mixed * streams[0], d_mixed * streams[1]))
        for g in tl.static_range(2):
            d_alpha = d_alpha + (dots[g] * alpha[g] * (1 - alpha[g]),)
            d_weight = tiles.load_number(d_next, 2 * count + g, tile)
            d_beta = d_beta + (d_weight * 2 * half_beta[g] * (1 - half_beta[g]),)
        alpha_factors, alpha_shrink = _gate_backward(d_alpha, result.alpha, gates, numbers, 0, tile)
        beta_factors, beta_shrink = _gate_backward(d_beta, result.beta, gates, numbers, 1, tile)
        projected = alpha_factors + beta_factors
        gate_shrink = (alpha_shrink + beta_shrink) * scale * scale / (2 * D)
    for one in range(1, 1 + once):  # now, while `streams` and d_h are here; with `one`, it cannot be done before
        gate_sums = tiles.added(gate_sums, gate_terms(scaled(projected, one), streams))
        if len(mixing) > 0:
            norm_sums = tiles.added(norm_sums, norm_term(scaled(mixing, one), streams, d_h))
    if len(gates) > 0:
        d_streams = ()
        for o in tl.static_range(2):
            d_stream = alpha[o][:, None] * d_mixed
            if STREAMS > 0:
                mass = result.masses[o]
                d_stream -= (gate_shrink * mass)[:, None] * result.stored[o].to(tl.float32)
                d_stream -= (gate_shrink * (1 - mass))[:, None] * live[VALUE[o]]
            else:
                d_stream -= gate_shrink[:, None] * streams[o]
            d_streams = d_streams + (d_stream,)
        for g in range(0, 2 * once):  # not unrolled: a part of the weights' rows at a time
            factors = tl.where(g == 0, projected[0], projected[1]), tl.where(g == 0, projected[2], projected[3])
            terms = ()
            for o in tl.static_range(2):
                alpha_row = tiles.parameter(gates[0] + (2 * g + o) * D, tile)
                beta_row = tiles.parameter(gates[3] + (2 * g + o) * D, tile)
                terms = terms + (factors[0][:, None] * alpha_row + factors[1][:, None] * beta_row,)
            d_streams = tiles.added(d_streams, terms)
    # through the merge and the transport
    terms = ()
    for o in tl.static_range(len(KEY) if STREAMS > 0 else 0):
        terms = terms + (d_streams[o] * (result.stored[o].to(tl.float32) - live[VALUE[o]]),)
    dots = tiles.row_sums(terms) if STREAMS > 0 else ()
    d_live = tiles.zeros(STREAMS, tile.at.shape)
    for o in tl.static_range(len(KEY)):
        d_row = d_streams[o]
        if STREAMS > 0:
            mass, key_scale = result.masses[o], result.key_scales[o]
            d_zeta = dots[o] * mass * (1 - mass)
            d_score = -d_zeta * key_scale
            scored = scored + (d_score,)
            tiles.store_number(gradients.log_partition, o, tile, d_zeta)
            d_row = mass[:, None] * d_streams[o]
            shrink = d_score * result.logits[o] * key_scale / D
            terms = ()
            for j in tl.static_range(STREAMS):
                term = tl.zeros(tile.at.shape, tl.float32)
                if VALUE[o] == j:
                    term += (1 - mass)[:, None] * d_streams[o]
                if KEY[o] == j:
                    query = tiles.parameter(arguments.query + o * D, tile)
                    term += d_score[:, None] * query - shrink[:, None] * live[j]
                terms = terms + (term,)
            d_live = tiles.added(d_live, terms)
        if incoming.retrieved is not None:
            d_row += tiles.load_row(incoming.retrieved + o * tile.tokens * D, tile)
        tiles.store_row(gradients.retrieved + o * tile.tokens * D, tile, d_row)
    query_sums = tiles.added(query_sums, query_terms(scored, live, KEY))
    d_moved, rho = (), ()
    if incoming.live is not None:
        d_moved = tiles.load_streams(incoming.live, tile, STREAMS)
    if STREAMS > 0 and len(gates) > 0:
        rho = result.rho.outputs[0]
        if len(d_moved) > 0:
            d_apart = d_moved[0].to(tl.float32) - d_moved[1].to(tl.float32)
            d_rho += tl.sum(d_apart * (live[0] - live[1]), 1)
        tiles.store_number(numbers.rho, 0, tile, rho)
        rho_factors, rho_shrink = _gate_backward((d_rho * rho * (1 - rho),), result.rho, gates, numbers, 2, tile)
        projected = projected + rho_factors
        rho_sums = tiles.added(rho_sums, gate_terms(rho_factors, live))
        shrink = (rho_shrink * result.rho.scale * result.rho.scale / (2 * D))[:, None]
        terms = ()
        for j in tl.static_range(2):
            terms = terms + (rho_factors[0][:, None] * tiles.parameter(gates[6] + j * D, tile) - shrink * live[j],)
        d_live = tiles.added(d_live, terms)
    if len(d_moved) > 0:
        terms = ()
        for j in tl.static_range(STREAMS):
            term = d_moved[j].to(tl.float32)
            if len(gates) > 0:  # M(ρ) is symmetric
                term = rho[:, None] * term + (1 - rho)[:, None] * d_moved[1 - j].to(tl.float32)
            terms = terms + (term,)
        d_live = tiles.added(d_live, terms)
    # through the sum of updates
    if gradients.carrier is not None:
        for j in tl.static_range(STREAMS):
            tiles.store_row(gradients.carrier + j * tile.tokens * D, tile, d_live[j])
    if STREAMS > 0:
        FRESH: tl.constexpr = len(gradients.updates)
        if FRESH == 1:
            _term_backward(d_live, arguments, gradients, count - 1, 0, result.last, tile)
        elif FRESH > 1:
            for k in range(count - FRESH, count):
                update = tiles.load_stored(tiles.pick(arguments.updates, k), tile) if len(gates) > 0 else None
                _term_backward(d_live, arguments, gradients, k, FRESH + k - count, update, tile)
    return Sums(gate_sums, rho_sums, query_sums, norm_sums), Factors(result.masses, projected, scored, mixing)


@triton.jit(do_not_specialize=["tokens", "count", "chunk", "once"])
def _read_backward(
    incoming,
    arguments,
    results,
    tokens: tl.int64,
    count,
    chunk,
    once,  # 1, unknown to the compiler
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SUMS: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """The row gradients of a chunk of tokens, and its part of the weights' or the factors for `_weight_gradients`."""
    gradients, numbers, partial, factors = results
    column = tl.arange(0, SHAPE.WIDTH)
    first = tl.program_id(1).to(tl.int64) * chunk
    sums = zero_sums(SUMS, SHAPE)
    for start in range(first, tl.minimum(first + chunk, tokens), SHAPE.TOKENS):
        tile = tiles.tile_at(start + tl.arange(0, SHAPE.TOKENS), column, tokens, SHAPE.D)
        given = (incoming, arguments, gradients, numbers)
        sums, own = backward(sums, given, count, once, tile, KEY, VALUE, SHAPE)
        if factors is not None:
            flat = own.masses + own.projected + own.scored + own.mixing
            for n in tl.static_range(len(flat)):
                tiles.store_number(factors, n, tile, flat[n])
    tiles.store_sums(partial, sums.gates + sums.rho + sums.query + sums.norm, column, SHAPE.D)


@triton.jit(do_not_specialize=["tokens", "count", "carried"])
def _transport_backward(d_next, rho, d_coefficients, tokens: tl.int64, count, carried, SHAPE: tl.constexpr):
    """dC_k = M(ρ) d[M C]_k, plus what `_read_backward` has stored there for k ≥ `carried`."""
    tile = tiles.rows_of_program(tokens, SHAPE)
    own = tiles.load_number(rho, 0, tile)
    for k in range(0, count):
        moved = transported(load_pair(d_next, k, tile), own)
        store_pair(d_coefficients, k, tile, tiles.added(moved, load_pair(d_coefficients, k, tile, k >= carried)))


@triton.jit
def _load_numbers(numbers, first, COUNT: tl.constexpr, tile):
    loaded = ()
    for n in tl.static_range(COUNT):
        loaded = loaded + (tiles.load_number(numbers, first + n, tile),)
    return loaded


@triton.jit(do_not_specialize=["tokens", "count", "chunk"])
def _weight_gradients(
    d_h,
    arguments,
    factors,
    partial,
    tokens: tl.int64,
    count,
    chunk,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    HEIGHTS: tl.constexpr,
    SUMS: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """The chunk's part of the gradients of the weights, if `_read_backward` has no registers for their sums."""
    column = tl.program_id(0) * SHAPE.WIDTH + tl.arange(0, SHAPE.WIDTH)
    first = tl.program_id(1).to(tl.int64) * chunk
    sums = zero_sums(SUMS, SHAPE)
    for start in range(first, tl.minimum(first + chunk, tokens), SHAPE.TOKENS):
        tile = tiles.tile_at(start + tl.arange(0, SHAPE.TOKENS), column, tokens, SHAPE.D)
        masses = _load_numbers(factors, 0, HEIGHTS[0], tile)
        projected = _load_numbers(factors, HEIGHTS[0], HEIGHTS[1], tile)
        scored = _load_numbers(factors, HEIGHTS[0] + HEIGHTS[1], HEIGHTS[2], tile)
        mixing = _load_numbers(factors, HEIGHTS[0] + HEIGHTS[1] + HEIGHTS[2], HEIGHTS[3], tile)
        stored = tiles.load_streams(arguments.retrieved, tile, len(KEY))
        live, _ = tiles.combine(arguments, count, tile, SHAPE.STREAMS)
        streams = merge(stored, live, masses, VALUE)
        norm_sums = sums.norm
        if len(mixing) > 0:
            norm_sums = tiles.added(norm_sums, norm_term(mixing, streams, tiles.load_row(d_h, tile)))
        sums = Sums(
            tiles.added(sums.gates, gate_terms(projected[0:4], streams)),
            tiles.added(sums.rho, gate_terms(projected[4:5], live)),
            tiles.added(sums.query, query_terms(scored, live, KEY)),
            norm_sums,
        )
    tiles.store_sums(partial, sums.gates + sums.rho + sums.query + sums.norm, column, SHAPE.D)


def write(arguments: WriteArguments, results: list[Tensor]) -> None:
    (live,) = results
    tokens, streams = live[0, ..., 0].numel(), len(live)
    given = Live(pointers(arguments.updates), arguments.coefficients)
    launch(_write, rows(tokens, live.shape[-1], streams, streams), given, live, tokens, len(arguments.updates))


def write_backward(d_live: Tensor, arguments: WriteArguments, gradients: WriteArguments) -> None:
    tokens, streams = d_live[0, ..., 0].numel(), len(d_live)
    given, d_given = (Live(pointers(of.updates), of.coefficients) for of in (arguments, gradients))
    tiling = rows(tokens, d_live.shape[-1], streams, streams)
    launch(_write_backward, tiling, d_live, given, d_given, tokens, len(arguments.coefficients), arguments.carried)


@triton.jit(do_not_specialize=["tokens", "count"])
def _write(given, live, tokens: tl.int64, count, SHAPE: tl.constexpr):
    """P^j = Σ_k C_k^j u_k."""
    tile = tiles.rows_of_program(tokens, SHAPE)
    streams, _ = tiles.combine(given, count, tile, SHAPE.STREAMS)
    for j in tl.static_range(SHAPE.STREAMS):
        tiles.store_row(live + j * tokens * SHAPE.D, tile, streams[j])


@triton.jit(do_not_specialize=["tokens", "count", "carried"])
def _write_backward(d_live, given, d_given, tokens: tl.int64, count, carried, SHAPE: tl.constexpr):
    """du_k = Σ_j C_k^j dP^j and, unless the coefficients are constants, dC_k^j = u_k · dP^j, for k ≥ `carried`."""
    tile = tiles.rows_of_program(tokens, SHAPE)
    d_streams = tiles.load_streams(d_live, tile, SHAPE.STREAMS)
    if d_given.coefficients is not None:
        for n in range(0, carried * SHAPE.STREAMS):
            tiles.store_number(d_given.coefficients, n, tile, 0.0)
    if len(d_given.updates) > 0:
        for k in range(carried, count):
            update = tiles.load_row(tiles.pick(given.updates, k - carried), tile) if len(given.updates) > 0 else None
            d_update = tiles.pick(d_given.updates, k - carried)
            d_weights = tiles.term_backward(d_streams, given.coefficients, k, update, d_update, tile)
            for j in tl.static_range(len(d_weights)):
                tiles.store_number(d_given.coefficients, k * SHAPE.STREAMS + j, tile, d_weights[j])
