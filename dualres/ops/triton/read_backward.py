"""The gradient of phase 2 on a GPU.

The first kernel recomputes a token's rows and writes all row gradients, and token-wise factors. The second multiplies
the rows by these factors and sums over chunks of tokens: the gradients of the weights, without atomics.
"""
# N tokens  D width  J stored streams  O output streams  K updates  G gate values
# ruff: noqa: N803
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, assignment"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualres.ops.arguments import ReadArguments
from dualres.ops.triton import tiles
from dualres.ops.triton.launch import columns, launch, pointers, rows
from dualres.ops.triton.read import forward, merge, open_gate, pack, transported


class Factors(NamedTuple):
    """The factors of the rows in the gradients of the weights, per token, all float32."""

    mixing: Tensor  # of the streams in the normed h (O,N)
    masses: Tensor  # of h̃ in a stream (O,N)
    scored: Tensor  # of the keys in dq (O,N)
    projected: Tensor  # of the streams in dW (G,N)
    d_biases: Tensor  # dz (G,N)
    d_scales: Tensor  # ds of each gate (gates,N)


def read_backward(d_h: Tensor, d_next: Tensor, arguments: ReadArguments) -> list[Tensor]:
    partition, gates, normed = arguments.log_partition, arguments.gates, arguments.norm is not None
    tokens, outputs, width = partition[0].numel(), len(arguments.key), d_h.shape[-1]
    d_retrieved, d_partition = torch.empty_like(arguments.retrieved), torch.empty_like(partition)
    d_updates = [torch.empty_like(update) for update in arguments.updates]
    d_coefficients = None if arguments.coefficients is None or not gates else torch.empty_like(arguments.coefficients)
    values = sum(map(len, gates[2::3]))
    heights = (outputs, outputs, outputs, values, values, len(gates) // 3)
    factors = Factors(*(partition.new_empty(height, tokens) for height in heights))
    packed, constants = pack(arguments)
    launch(
        _read_backward,
        rows(tokens, width),
        d_h,
        d_next,
        packed,
        d_retrieved,
        d_partition,
        pointers(d_updates),
        d_coefficients,
        factors,
        tokens,
        len(d_updates),
        **constants,
    )
    sizes = [weight[..., 0].numel() for weight in gates[0::3]] + [outputs if d_updates else 0, int(normed)]
    tiling = columns(tokens, width, max(1, sum(sizes)))
    partial = partition.new_empty(tiling.grid[1], sum(sizes), width)  # of the gates, the queries, the norm
    if sum(sizes):
        launch(
            _weight_gradients,
            tiling,
            d_h,
            packed,
            factors,
            partial,
            tokens,
            len(d_updates),
            tiling.chunk,
            **constants,
            SUMS=sum(sizes),
        )
    *d_weights, d_queries, d_norm = (part.sum(0) for part in partial.split(sizes, 1))
    gradients = [d_retrieved]
    if d_updates:
        gradients += [d_partition, *d_updates, *([d_coefficients] if d_coefficients is not None else []), d_queries]
    d_biases = factors.d_biases.split([len(bias) for bias in gates[2::3]])
    for weight, d_weight, d_scale, d_bias in zip(gates[0::3], d_weights, factors.d_scales, d_biases, strict=True):
        gradients += [d_weight.view(weight.shape), d_scale.sum().view(1), d_bias.sum(1)]
    return [*gradients, *([d_norm[0]] if normed else [])]


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
    d_retrieved,
    d_partition,
    d_updates,
    d_coefficients,
    factors,
    tokens: tl.int64,
    count,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    STREAMS: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """All row gradients, and the token-wise factors that `_weight_gradients` multiplies rows by."""
    gates = arguments.gates
    tile = tiles.rows_of_program(tokens, D, TOKENS, WIDTH)
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
    d_live = tiles.zeros(STREAMS, (TOKENS, WIDTH))
    for o in tl.static_range(len(KEY)):
        d_row = d_streams[o]
        if STREAMS > 0:
            mass, key_scale = result.masses[o], result.key_scales[o]
            apart = result.stored[o].to(tl.float32) - live[VALUE[o]]
            d_zeta = tl.sum(d_streams[o] * apart, 1) * mass * (1 - mass)
            d_score = -d_zeta * key_scale
            tiles.store_number(d_partition, o, tile, d_zeta)
            tiles.store_number(factors.masses, o, tile, mass)
            tiles.store_number(factors.scored, o, tile, d_score)
            d_row = mass[:, None] * d_streams[o]
            shrink = d_score * result.logits[o] * key_scale / D
            terms = ()
            for j in tl.static_range(STREAMS):
                term = tl.zeros([TOKENS, WIDTH], tl.float32)
                if VALUE[o] == j:
                    term += (1 - mass)[:, None] * d_streams[o]
                if KEY[o] == j:
                    query = tiles.parameter(arguments.query + o * D, tile)
                    term += d_score[:, None] * query - shrink[:, None] * live[j]
                terms = terms + (term,)
            d_live = tiles.added(d_live, terms)
        tiles.store_row(d_retrieved + o * tokens * D, tile, d_row)
    # through ρ
    if STREAMS > 0 and len(gates) > 0:
        gate = open_gate(live, tiles.inverse_rms(live, arguments.eps, D), gates[6:9], 1, tile)
        rho = gate.outputs[0]
        d_rho = tl.zeros([TOKENS], tl.float32)
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
            learned = arguments.updates if len(gates) > 0 else ()  # without gates the coefficients are constants
            d_weights = tiles.combine_backward(d_live, learned, d_updates, arguments.coefficients, k, tile)
            if len(gates) > 0:
                first, second = transported(d_next, k, rho, tile)  # M(ρ) is symmetric
                tiles.store_number(d_coefficients, 2 * k, tile, first + d_weights[0])
                tiles.store_number(d_coefficients, 2 * k + 1, tile, second + d_weights[1])


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
    STREAMS: tl.constexpr,
    SUMS: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The chunk's part of dW_α, dW_β (each 2×2 rows), dW_ρ (2), dq (O), dw of the norm (1), if they exist."""
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    first = tl.program_id(1).to(tl.int64) * chunk
    sums = tiles.zeros(SUMS, (TOKENS, WIDTH))
    for start in range(first, tl.minimum(first + chunk, tokens), TOKENS):
        tile = tiles.tile_at(start + tl.arange(0, TOKENS), column, tokens, D)
        stored = tiles.load_streams(arguments.retrieved, tile, len(KEY))
        live = tiles.combine(arguments.updates, arguments.coefficients, count, tile, STREAMS)
        masses, terms = (), ()
        if STREAMS > 0:
            for o in tl.static_range(len(KEY)):
                masses = masses + (tiles.load_number(factors.masses, o, tile),)
        streams = merge(stored, live, masses, VALUE)
        if len(arguments.gates) > 0:
            for n in tl.static_range(4):
                factor = tiles.load_number(factors.projected, n, tile)[:, None]
                terms = terms + (factor * streams[0], factor * streams[1])
            if STREAMS > 0:
                factor = tiles.load_number(factors.projected, 4, tile)[:, None]
                terms = terms + (factor * live[0], factor * live[1])
        if STREAMS > 0:
            for o in tl.static_range(len(KEY)):
                terms = terms + (tiles.load_number(factors.scored, o, tile)[:, None] * live[KEY[o]],)
        if arguments.norm is not None:
            row = tl.zeros([TOKENS, WIDTH], tl.float32)
            for o in tl.static_range(len(KEY)):
                row += tiles.load_number(factors.mixing, o, tile)[:, None] * streams[o]
            terms = terms + (row * tiles.load_row(d_h, tile),)
        sums = tiles.added(sums, terms)
    tiles.store_sums(partial, sums, column, D)
