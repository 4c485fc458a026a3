"""Reads (phase 2) and writes of the live streams on a GPU, and their gradients.

A read is one pass that loads each of its rows once. The first kernel of its gradient recomputes a token's rows and
writes all row gradients, and token-wise factors. The second multiplies the rows by these factors and sums over chunks
of tokens: the gradients of the weights, without atomics.
"""
# N tokens  D width  J stored streams  O output streams  K updates  G gate values
# ruff: noqa: N803, N806
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, assignment"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualres.ops.arguments import Live, ReadArguments, WriteArguments
from dualres.ops.triton import tiles
from dualres.ops.triton.launch import columns, launch, pointers, route, rows


def read(arguments: ReadArguments, results: list[Tensor]) -> None:
    tokens, width = arguments.log_partition[0].numel(), results[0].shape[-1]
    tiling, count = rows(tokens, width, streams=live_count(arguments)), len(arguments.updates)
    launch(_read, tiling, pack(arguments), tuple(results), tokens, count, **route(arguments))


def live_count(arguments: ReadArguments) -> int:
    """The number of live streams."""
    return 0 if arguments.coefficients is None else arguments.coefficients.shape[1]


def pack(arguments: ReadArguments) -> Any:
    """The arguments as a kernel takes them: lists as tuples, without the route, which is constant."""
    tuples: Any = {"updates": pointers(arguments.updates), "gates": tuple(arguments.gates), "key": None, "value": None}
    return arguments._replace(**tuples)


class GateTile(NamedTuple):
    """One gate for a tile's tokens; tuples over the gate's values."""

    scale: Any  # the inverse norm of its input streams
    projected: Any  # x W
    outputs: Any  # σ(gate scale · x̄ W + bias)


class Forward(NamedTuple):
    """What a read computes for a tile; tuples over streams, empty without a live state or gates."""

    stored: Any  # h̃, as stored
    live: Any  # P
    masses: Any  # λ
    logits: Any  # a
    key_scales: Any  # the inverse norms of the keys
    streams: Any  # h̃ and the live state merged
    alpha: Any
    beta: Any  # β / 2: a `GateTile` without the factor 2
    mixed: Any  # what the branch reads, before its norm


@triton.jit
def _project(streams, weight, tile):
    """Σ_j x^j · W^j, one gate value."""
    total = tl.sum(streams[0] * tiles.parameter(weight, tile), 1)
    for j in tl.static_range(1, len(streams)):
        total += tl.sum(streams[j] * tiles.parameter(weight + j * tile.D, tile), 1)
    return total


@triton.jit
def open_gate(streams, scale, parameters, COUNT: tl.constexpr, tile):
    """The `GateTile` of `COUNT` values with these parameters: weight, scale, bias."""
    projected, outputs = (), ()
    for g in tl.static_range(COUNT):
        e = _project(streams, parameters[0] + g * len(streams) * tile.D, tile)
        projected = projected + (e,)
        outputs = outputs + (tl.sigmoid(tl.load(parameters[1]) * scale * e + tl.load(parameters[2] + g)),)
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
def forward(arguments, count, tile, KEY: tl.constexpr, VALUE: tl.constexpr, STREAMS: tl.constexpr):
    """λ = σ(ζ − a), the merged streams, their α and β, and the branch input."""
    stored = tiles.load_streams(arguments.retrieved, tile, len(KEY))
    live = tiles.combine(arguments, count, tile, STREAMS)
    masses, logits, key_scales = (), (), ()
    if STREAMS > 0:
        for o in tl.static_range(len(KEY)):
            keys = live[KEY[o]]
            scale = tiles.inverse_rms((keys,), arguments.eps, tile.D)
            logit = tl.sum(keys * tiles.parameter(arguments.query + o * tile.D, tile), 1) * scale
            mass = tl.sigmoid(tiles.load_number(arguments.log_partition, o, tile) - logit)
            masses, logits, key_scales = masses + (mass,), logits + (logit,), key_scales + (scale,)
    streams = merge(stored, live, masses, VALUE)
    alpha, beta, mixed = (), (), streams[0]
    if len(arguments.gates) > 0:
        scale = tiles.inverse_rms(streams, arguments.eps, tile.D)
        alpha = open_gate(streams, scale, arguments.gates[0:3], 2, tile)
        beta = open_gate(streams, scale, arguments.gates[3:6], 2, tile)
        mixed = alpha.outputs[0][:, None] * streams[0] + alpha.outputs[1][:, None] * streams[1]
    return Forward(stored, live, masses, logits, key_scales, streams, alpha, beta, mixed)


@triton.jit
def transported(coefficients, k, rho, tile):
    """M(ρ) C_k with M = [[ρ, 1-ρ], [1-ρ, ρ]]."""
    first, second = tiles.load_number(coefficients, 2 * k, tile), tiles.load_number(coefficients, 2 * k + 1, tile)
    return rho * first + (1 - rho) * second, (1 - rho) * first + rho * second


@triton.jit(do_not_specialize=["tokens", "count"])
def _read(arguments, results, tokens: tl.int64, count, KEY: tl.constexpr, VALUE: tl.constexpr, SHAPE: tl.constexpr):
    """`reference.gated_read`, or `reference.read` without gates."""
    h, next_coefficients = results
    tile = tiles.rows_of_program(tokens, SHAPE)
    result = forward(arguments, count, tile, KEY, VALUE, SHAPE.STREAMS)
    if len(arguments.gates) > 0:
        for j in tl.static_range(2):
            tiles.store_number(next_coefficients, 2 * count + j, tile, 2 * result.beta.outputs[j])
        if SHAPE.STREAMS > 0:
            live_scale = tiles.inverse_rms(result.live, arguments.eps, SHAPE.D)
            rho = open_gate(result.live, live_scale, arguments.gates[6:9], 1, tile)
            for k in range(0, count):
                first, second = transported(arguments.coefficients, k, rho.outputs[0], tile)
                tiles.store_number(next_coefficients, 2 * k, tile, first)
                tiles.store_number(next_coefficients, 2 * k + 1, tile, second)
    tiles.store_row(h, tile, tiles.norm_forward(result.mixed, arguments.norm, arguments.norm_eps, tile))


class Factors(NamedTuple):
    """The factors of the rows in the gradients of the weights, per token, all float32."""

    mixing: Tensor  # of the streams in h before its norm (O,N)
    masses: Tensor  # of h̃ in a stream (O,N)
    scored: Tensor  # of the keys in dq (O,N)
    projected: Tensor  # of the streams in dW (G,N)
    d_biases: Tensor  # dz (G,N)
    d_scales: Tensor  # ds of each gate (gates,N)


def read_backward(d_h: Tensor, d_next: Tensor, arguments: ReadArguments, gradients: ReadArguments) -> None:
    partition, gates, streams = arguments.log_partition, gradients.gates, live_count(arguments)
    tokens, count, outputs, width = d_h[..., 0].numel(), len(arguments.updates), len(arguments.key), d_h.shape[-1]
    values = sum(map(len, gates[2::3]))
    heights = (outputs, outputs, outputs, values, values, len(gates) // 3)
    factors = Factors(*(partition.new_empty(height, tokens) for height in heights))
    packed, constants = pack(arguments), route(arguments)
    d_rows = pack(gradients._replace(query=None, gates=[], norm=None))
    tiling = rows(tokens, width, streams=streams)
    launch(_read_backward, tiling, d_h, d_next, packed, d_rows, factors, tokens, count, **constants)
    d_weights = [d.view(-1, width) for d in (*gates[0::3], gradients.query, gradients.norm) if d is not None]
    if d_weights:
        sizes = list(map(len, d_weights))
        tiling = columns(tokens, width, sum(sizes), streams)
        partial = partition.new_empty(tiling.grid[1], sum(sizes), width)
        numbers = (tokens, count, tiling.chunk)
        launch(_weight_gradients, tiling, d_h, packed, factors, partial, *numbers, **constants, SUMS=sum(sizes))
        for d_weight, parts in zip(d_weights, partial.split(sizes, 1), strict=True):
            torch.sum(parts, 0, out=d_weight)
    d_biases = factors.d_biases.split(list(map(len, gates[2::3])))
    for n, (d_scale, d_bias) in enumerate(zip(factors.d_scales, d_biases, strict=True)):
        torch.sum(d_scale, 0, keepdim=True, out=gates[3 * n + 1])
        torch.sum(d_bias, 1, out=gates[3 * n + 2])


@triton.jit
def _gate_backward(dz, gate, gates, factors, INDEX: tl.constexpr, tile):
    """Back through z = s · m · e + bias with e = x W: stores dz · s · m and dz of every gate value, and the gate's ds.

    -> dz · s · m, a tuple over the gate values: the factor of W in dx and of x in dW; and the norm's factor of x in dx
    """
    d_projected, total = (), tl.zeros_like(gate.scale)
    gate_scale = tl.load(gates[3 * INDEX + 1])
    for g in tl.static_range(len(dz)):
        factor = dz[g] * gate_scale * gate.scale
        d_projected = d_projected + (factor,)
        total += dz[g] * gate.scale * gate.projected[g]
        tiles.store_number(factors.projected, 2 * INDEX + g, tile, factor)
        tiles.store_number(factors.d_biases, 2 * INDEX + g, tile, dz[g])
    tiles.store_number(factors.d_scales, INDEX, tile, total)
    return d_projected, total * gate_scale


@triton.jit(do_not_specialize=["tokens", "count"])
def _read_backward(
    d_h,
    d_next,
    arguments,
    gradients,
    factors,
    tokens: tl.int64,
    count,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """All row gradients, and the token-wise factors that `_weight_gradients` multiplies rows by."""
    D: tl.constexpr = SHAPE.D
    STREAMS: tl.constexpr = SHAPE.STREAMS
    gates = arguments.gates
    tile = tiles.rows_of_program(tokens, SHAPE)
    result = forward(arguments, count, tile, KEY, VALUE, STREAMS)
    live, streams = result.live, result.streams
    # through the norm of the branch
    d_mixed = tiles.load_row(d_h, tile)
    if arguments.norm is not None:
        d_mixed, r, _ = tiles.norm_backward(d_mixed, result.mixed, arguments.norm, arguments.norm_eps, tile)
        for o in tl.static_range(len(KEY)):
            tiles.store_number(factors.mixing, o, tile, result.alpha.outputs[o] * r if len(gates) > 0 else r)
    # through α and β
    d_streams = (d_mixed,)
    if len(gates) > 0:
        alpha, half_beta, scale = result.alpha.outputs, result.beta.outputs, result.alpha.scale
        d_alpha, d_beta = (), ()
        for g in tl.static_range(2):
            d_alpha = d_alpha + (tl.sum(d_mixed * streams[g], 1) * alpha[g] * (1 - alpha[g]),)
            d_weight = tiles.load_number(d_next, 2 * count + g, tile)
            d_beta = d_beta + (d_weight * 2 * half_beta[g] * (1 - half_beta[g]),)
        alpha_factors, alpha_shrink = _gate_backward(d_alpha, result.alpha, gates, factors, 0, tile)
        beta_factors, beta_shrink = _gate_backward(d_beta, result.beta, gates, factors, 1, tile)
        gate_shrink = (alpha_shrink + beta_shrink) * scale * scale / (2 * D)
        d_streams = ()
        for o in tl.static_range(2):
            d_stream = alpha[o][:, None] * d_mixed - gate_shrink[:, None] * streams[o]
            for g in tl.static_range(2):
                d_stream += alpha_factors[g][:, None] * tiles.parameter(gates[0] + (2 * g + o) * D, tile)
                d_stream += beta_factors[g][:, None] * tiles.parameter(gates[3] + (2 * g + o) * D, tile)
            d_streams = d_streams + (d_stream,)
    # through the merge
    d_live = tiles.zeros(STREAMS, (SHAPE.TOKENS, SHAPE.WIDTH))
    for o in tl.static_range(len(KEY)):
        d_row = d_streams[o]
        if STREAMS > 0:
            mass, key_scale = result.masses[o], result.key_scales[o]
            apart = result.stored[o].to(tl.float32) - live[VALUE[o]]
            d_zeta = tl.sum(d_streams[o] * apart, 1) * mass * (1 - mass)
            d_score = -d_zeta * key_scale
            tiles.store_number(gradients.log_partition, o, tile, d_zeta)
            tiles.store_number(factors.masses, o, tile, mass)
            tiles.store_number(factors.scored, o, tile, d_score)
            d_row = mass[:, None] * d_streams[o]
            shrink = d_score * result.logits[o] * key_scale / D
            terms = ()
            for j in tl.static_range(STREAMS):
                term = tl.zeros([SHAPE.TOKENS, SHAPE.WIDTH], tl.float32)
                if VALUE[o] == j:
                    term += (1 - mass)[:, None] * d_streams[o]
                if KEY[o] == j:
                    query = tiles.parameter(arguments.query + o * D, tile)
                    term += d_score[:, None] * query - shrink[:, None] * live[j]
                terms = terms + (term,)
            d_live = tiles.added(d_live, terms)
        tiles.store_row(gradients.retrieved + o * tokens * D, tile, d_row)
    # through ρ
    if STREAMS > 0 and len(gates) > 0:
        gate = open_gate(live, tiles.inverse_rms(live, arguments.eps, D), gates[6:9], 1, tile)
        rho = gate.outputs[0]
        d_rho = tl.zeros([SHAPE.TOKENS], tl.float32)
        for k in range(0, count):
            d_apart = tiles.load_number(d_next, 2 * k, tile) - tiles.load_number(d_next, 2 * k + 1, tile)
            first = tiles.load_number(arguments.coefficients, 2 * k, tile)
            d_rho += d_apart * (first - tiles.load_number(arguments.coefficients, 2 * k + 1, tile))
        rho_factors, rho_shrink = _gate_backward((d_rho * rho * (1 - rho),), gate, gates, factors, 2, tile)
        shrink = (rho_shrink * gate.scale * gate.scale / (2 * D))[:, None]
        terms = ()
        for j in tl.static_range(2):
            terms = terms + (rho_factors[0][:, None] * tiles.parameter(gates[6] + j * D, tile) - shrink * live[j],)
        d_live = tiles.added(d_live, terms)
    # through the sum of updates
    if STREAMS > 0:
        for k in range(0, count):
            d_weights = tiles.combine_backward(d_live, arguments, gradients, k, tile)
            if len(gates) > 0:  # otherwise the coefficients are constants
                first, second = transported(d_next, k, rho, tile)  # M(ρ) is symmetric
                tiles.store_number(gradients.coefficients, 2 * k, tile, first + d_weights[0])
                tiles.store_number(gradients.coefficients, 2 * k + 1, tile, second + d_weights[1])


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
    SUMS: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """The chunk's part of dW_α, dW_β (each 2×2 rows), dW_ρ (2), dq (O), dw of the norm (1), if they exist."""
    column = tl.program_id(0) * SHAPE.WIDTH + tl.arange(0, SHAPE.WIDTH)
    first = tl.program_id(1).to(tl.int64) * chunk
    sums = tiles.zeros(SUMS, (SHAPE.TOKENS, SHAPE.WIDTH))
    for start in range(first, tl.minimum(first + chunk, tokens), SHAPE.TOKENS):
        tile = tiles.tile_at(start + tl.arange(0, SHAPE.TOKENS), column, tokens, SHAPE.D)
        stored = tiles.load_streams(arguments.retrieved, tile, len(KEY))
        live = tiles.combine(arguments, count, tile, SHAPE.STREAMS)
        masses, terms = (), ()
        if SHAPE.STREAMS > 0:
            for o in tl.static_range(len(KEY)):
                masses = masses + (tiles.load_number(factors.masses, o, tile),)
        streams = merge(stored, live, masses, VALUE)
        if len(arguments.gates) > 0:
            for n in tl.static_range(4):
                factor = tiles.load_number(factors.projected, n, tile)[:, None]
                terms = terms + (factor * streams[0], factor * streams[1])
            if SHAPE.STREAMS > 0:
                factor = tiles.load_number(factors.projected, 4, tile)[:, None]
                terms = terms + (factor * live[0], factor * live[1])
        if SHAPE.STREAMS > 0:
            for o in tl.static_range(len(KEY)):
                terms = terms + (tiles.load_number(factors.scored, o, tile)[:, None] * live[KEY[o]],)
        if arguments.norm is not None:
            row = tl.zeros([SHAPE.TOKENS, SHAPE.WIDTH], tl.float32)
            for o in tl.static_range(len(KEY)):
                row += tiles.load_number(factors.mixing, o, tile)[:, None] * streams[o]
            terms = terms + (row * tiles.load_row(d_h, tile),)
        sums = tiles.added(sums, terms)
    tiles.store_sums(partial, sums, column, SHAPE.D)


def write(arguments: WriteArguments, results: list[Tensor]) -> None:
    (live,) = results
    tokens, streams = live[0, ..., 0].numel(), len(live)
    given = Live(pointers(arguments.updates), arguments.coefficients)
    launch(_write, rows(tokens, live.shape[-1], streams, streams), given, live, tokens, len(arguments.updates))


def write_backward(d_live: Tensor, arguments: WriteArguments, gradients: WriteArguments) -> None:
    tokens, streams = d_live[0, ..., 0].numel(), len(d_live)
    given, d_given = (Live(pointers(updates), coefficients) for updates, coefficients in (arguments, gradients))
    tiling = rows(tokens, d_live.shape[-1], streams, streams)
    launch(_write_backward, tiling, d_live, given, d_given, tokens, len(gradients.updates))


@triton.jit(do_not_specialize=["tokens", "count"])
def _write(given, live, tokens: tl.int64, count, SHAPE: tl.constexpr):
    """P^j = Σ_k C_k^j u_k."""
    tile = tiles.rows_of_program(tokens, SHAPE)
    streams = tiles.combine(given, count, tile, SHAPE.STREAMS)
    for j in tl.static_range(SHAPE.STREAMS):
        tiles.store_row(live + j * tokens * SHAPE.D, tile, streams[j])


@triton.jit(do_not_specialize=["tokens", "count"])
def _write_backward(d_live, given, d_given, tokens: tl.int64, count, SHAPE: tl.constexpr):
    """du_k = Σ_j C_k^j dP^j and, with updates, dC_k^j = u_k · dP^j."""
    tile = tiles.rows_of_program(tokens, SHAPE)
    d_streams = tiles.load_streams(d_live, tile, SHAPE.STREAMS)
    for k in range(0, count):
        d_weights = tiles.combine_backward(d_streams, given, d_given, k, tile)
        for j in tl.static_range(len(d_weights)):
            tiles.store_number(d_given.coefficients, k * SHAPE.STREAMS + j, tile, d_weights[j])
