"""The gradient of phase 2 on a GPU.

The first kernel computes a token's rows again and writes every gradient of a row, and token-wise factors. The second
multiplies the rows by these factors and sums over chunks of tokens: the gradients of the weights, without atomics.
"""
# N tokens  D width  J stored streams  O output streams  K updates  G gate values
# ruff: noqa: N803, N806
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualres.ops.arguments import ReadArguments
from dualres.ops.triton.common import (
    added,
    columns,
    combine,
    inverse_rms,
    launch,
    parameter,
    pick,
    pointers,
    rows,
    stream_rows,
    zeros,
)
from dualres.ops.triton.read import merge, open_gates, stored_streams, widened


def read_backward(d_h: Tensor, d_next: Tensor, given: ReadArguments) -> list[Tensor]:
    """`autograd.read_backward`."""
    retrieved, partition, updates, coefficients, queries, gates, norm, key, value, eps, norm_eps = given
    tokens, outputs, width = partition[0].numel(), len(key), retrieved.shape[-1]
    live, gated, normed = bool(updates), bool(gates), norm is not None
    d_retrieved, d_partition = torch.empty_like(retrieved), torch.empty_like(partition)
    d_updates = [torch.empty_like(update) for update in updates]
    d_coefficients = torch.empty_like(coefficients) if gated and coefficients is not None else None
    # factors per token: of the rows in h; of h̃ in a row; of the keys in dq; of the rows in dW; dz; a gate's share of ds
    mixing, masses, scored = (partition.new_empty(outputs, tokens) for _ in range(3))
    projected, d_biases = (partition.new_empty(sum(map(len, gates[2::3])), tokens) for _ in range(2))
    d_scales = partition.new_empty(len(gates[1::3]), tokens)
    tile = rows(width)
    constants = {
        "KEY": tuple(key),
        "VALUE": tuple(value),
        "STREAMS": stored_streams(coefficients, key, value),
        "LIVE": live,
        "GATED": gated,
        "NORMED": normed,
        "D": width,
    }
    launch(
        _read_backward,
        tile.grid(tokens),
        d_h,
        d_next,
        retrieved,
        partition,
        pointers(updates or [retrieved]),
        coefficients,
        queries,
        tuple(gates),
        norm,
        d_retrieved,
        d_partition,
        pointers(d_updates or [retrieved]),
        d_coefficients,
        mixing,
        masses,
        scored,
        projected,
        d_biases,
        d_scales,
        tokens,
        len(updates),
        eps,
        norm_eps,
        **constants,
        TOKENS=tile.tokens,
        WIDTH=tile.width,
        warps=tile.warps,
    )
    sizes = [weight[..., 0].numel() for weight in gates[0::3]] + [outputs * live, int(normed)]
    cut = columns(tokens, width, max(1, sum(sizes)))
    partial = partition.new_empty(cut.grid[1], sum(sizes), width)  # of the gates, the queries, the norm
    if sum(sizes):
        launch(
            _weight_gradients,
            cut.grid,
            d_h,
            retrieved,
            pointers(updates or [retrieved]),
            coefficients,
            mixing,
            masses,
            scored,
            projected,
            partial,
            tokens,
            len(updates),
            cut.chunk,
            **constants,
            SUMS=sum(sizes),
            TOKENS=cut.tokens,
            WIDTH=cut.width,
            warps=cut.warps,
        )
    *d_weights, d_queries, d_norm = (part.sum(0) for part in partial.split(sizes, 1))
    found = [d_retrieved]
    if live:
        found += [d_partition, *d_updates, *([d_coefficients] if d_coefficients is not None else []), d_queries]
    for weight, d_weight, d_scale, d_bias in zip(
        gates[0::3], d_weights, d_scales.unbind(), d_biases.split([len(bias) for bias in gates[2::3]]), strict=True
    ):
        found += [d_weight.view(weight.shape), d_scale.sum().view(1), d_bias.sum(1)]
    return [*found, *([d_norm[0]] if normed else [])]


@triton.jit
def _gate_backward(dz, e, scale, gate_scale, projected, d_biases, d_scales, tokens, token, present):
    """Through z = s · m · e + bias with e = x W: stores dz · s · m of every gate value, dz, and the gate's share of ds.

    -> dz · s · m, a tuple over the gate values: what dx gets of W, and dW of x; and its sum with e, which the norm of x
    takes back
    """
    factors, total = (), tl.zeros_like(scale)
    for g in tl.static_range(len(dz)):
        factor = dz[g] * tl.load(gate_scale) * scale
        factors = factors + (factor,)
        total += dz[g] * scale * e[g]
        tl.store(projected + g * tokens + token, factor, present)
        tl.store(d_biases + g * tokens + token, dz[g], present)
    tl.store(d_scales + token, total, present)
    return factors, total * tl.load(gate_scale)


@triton.jit(do_not_specialize=["tokens", "count"])
def _read_backward(
    d_h,
    d_next,
    retrieved,
    partition,
    updates,
    coefficients,
    queries,
    gates,
    norm,
    d_retrieved,
    d_partition,
    d_updates,
    d_coefficients,
    mixing,
    masses,
    scored,
    projected,
    d_biases,
    d_scales,
    tokens: tl.int64,
    count,
    eps,
    norm_eps,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    STREAMS: tl.constexpr,
    LIVE: tl.constexpr,
    GATED: tl.constexpr,
    NORMED: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Every gradient of a row, and the token-wise factors that `_weight_gradients` multiplies rows by."""
    OUTPUTS: tl.constexpr = len(KEY)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, WIDTH)
    present = token < tokens
    mask = present[:, None] & (column < D)[None, :]
    at = token[:, None] * D + column[None, :]
    # forward again
    stored = stream_rows(retrieved, tokens, at, mask, D, OUTPUTS)
    if LIVE:
        live = combine(updates, coefficients, count, tokens, token, present, at, mask, STREAMS, TOKENS, WIDTH)
        streams, mass, logits, key_scales = merge(
            stored, live, partition, queries, eps, tokens, token, present, column, KEY, VALUE, D
        )
    else:
        streams = widened(stored)
    mixed = streams[0]
    if GATED:
        scale = inverse_rms(streams, eps, D)
        alpha_e, alpha = open_gates(streams, scale, gates[0:3], 2, column, D)
        beta_e, half_beta = open_gates(streams, scale, gates[3:6], 2, column, D)
        mixed = alpha[0][:, None] * streams[0] + alpha[1][:, None] * streams[1]
    # through the norm of the branch: dh = r g − r³ (g·h)/D h with g = w ⊙ dy
    d_mixed = tl.load(d_h + at, mask, other=0.0).to(tl.float32)
    if NORMED:
        r = inverse_rms((mixed,), norm_eps, D)
        d_mixed = d_mixed * parameter(norm, column, D)
        taken = r * r * r * tl.sum(d_mixed * mixed, 1) / D
        d_mixed = r[:, None] * d_mixed - taken[:, None] * mixed
        for o in tl.static_range(OUTPUTS):
            tl.store(mixing + o * tokens + token, alpha[o] * r if GATED else r, present)
    # through α and β
    d_streams = (d_mixed,)
    if GATED:
        d_alpha, d_beta = (), ()
        for g in tl.static_range(2):
            d_alpha = d_alpha + (tl.sum(d_mixed * streams[g], 1) * alpha[g] * (1 - alpha[g]),)
            d_weight = tl.load(d_next + (count * 2 + g) * tokens + token, present, other=0.0)
            d_beta = d_beta + (d_weight * 2 * half_beta[g] * (1 - half_beta[g]),)
        alpha_factors, alpha_taken = _gate_backward(
            d_alpha, alpha_e, scale, gates[1], projected, d_biases, d_scales, tokens, token, present
        )
        beta_factors, beta_taken = _gate_backward(
            d_beta,
            beta_e,
            scale,
            gates[4],
            projected + 2 * tokens,
            d_biases + 2 * tokens,
            d_scales + tokens,
            tokens,
            token,
            present,
        )
        taken = (alpha_taken + beta_taken) * scale * scale / (2 * D)
        d_streams = ()
        for o in tl.static_range(2):
            d_stream = alpha[o][:, None] * d_mixed - taken[:, None] * streams[o]
            for g in tl.static_range(2):
                d_stream += alpha_factors[g][:, None] * parameter(gates[0] + (2 * g + o) * D, column, D)
                d_stream += beta_factors[g][:, None] * parameter(gates[3] + (2 * g + o) * D, column, D)
            d_streams = d_streams + (d_stream,)
    # through the merge
    if LIVE:
        d_live = zeros(STREAMS, TOKENS, WIDTH)
        for o in tl.static_range(OUTPUTS):
            apart = stored[o].to(tl.float32) - live[VALUE[o]]
            d_zeta = tl.sum(d_streams[o] * apart, 1) * mass[o] * (1 - mass[o])
            d_score = -d_zeta * key_scales[o]
            tl.store(d_partition + o * tokens + token, d_zeta, present)
            tl.store(masses + o * tokens + token, mass[o], present)
            tl.store(scored + o * tokens + token, d_score, present)
            row = (mass[o][:, None] * d_streams[o]).to(d_retrieved.dtype.element_ty)
            tl.store(d_retrieved + o * tokens * D + at, row, mask)
            shrink = d_score * logits[o] * key_scales[o] / D
            terms = ()
            for j in tl.static_range(STREAMS):
                term = tl.zeros([TOKENS, WIDTH], tl.float32)
                if VALUE[o] == j:
                    term += (1 - mass[o])[:, None] * d_streams[o]
                if KEY[o] == j:
                    query = parameter(queries + o * D, column, D)
                    term += d_score[:, None] * query - shrink[:, None] * live[j]
                terms = terms + (term,)
            d_live = added(d_live, terms)
    else:
        for o in tl.static_range(OUTPUTS):
            tl.store(d_retrieved + o * tokens * D + at, d_streams[o].to(d_retrieved.dtype.element_ty), mask)
    # through ρ
    if LIVE and GATED:
        live_scale = inverse_rms(live, eps, D)
        rho_e, opened = open_gates(live, live_scale, gates[6:9], 1, column, D)
        rho = opened[0]
        d_rho = tl.zeros([TOKENS], tl.float32)
        for k in range(0, count):
            place = k * 2 * tokens + token
            d_apart = tl.load(d_next + place, present, other=0.0) - tl.load(d_next + place + tokens, present, other=0.0)
            first = tl.load(coefficients + place, present, other=0.0)
            d_rho += d_apart * (first - tl.load(coefficients + place + tokens, present, other=0.0))
        factors, rho_taken = _gate_backward(
            (d_rho * rho * (1 - rho),),
            rho_e,
            live_scale,
            gates[7],
            projected + 4 * tokens,
            d_biases + 4 * tokens,
            d_scales + 2 * tokens,
            tokens,
            token,
            present,
        )
        shrink = (rho_taken * live_scale * live_scale / (2 * D))[:, None]
        terms = ()
        for j in tl.static_range(2):
            terms = terms + (factors[0][:, None] * parameter(gates[6] + j * D, column, D) - shrink * live[j],)
        d_live = added(d_live, terms)
    # through the sum of updates
    if LIVE:
        for k in range(0, count):
            d_update = tl.zeros([TOKENS, WIDTH], tl.float32)
            for j in tl.static_range(STREAMS):
                weight = tl.load(coefficients + (k * STREAMS + j) * tokens + token, present, other=0.0)
                d_update += weight[:, None] * d_live[j]
            place = pick(d_updates, k) + at
            tl.store(place, d_update.to(place.dtype.element_ty), mask)
            if GATED:
                update = tl.load(pick(updates, k) + at, mask, other=0.0).to(tl.float32)
                scalar = k * 2 * tokens + token
                first = tl.load(d_next + scalar, present, other=0.0)
                second = tl.load(d_next + scalar + tokens, present, other=0.0)
                d_first = rho * first + (1 - rho) * second + tl.sum(update * d_live[0], 1)
                d_second = (1 - rho) * first + rho * second + tl.sum(update * d_live[1], 1)
                tl.store(d_coefficients + scalar, d_first, present)
                tl.store(d_coefficients + scalar + tokens, d_second, present)


@triton.jit(do_not_specialize=["tokens", "count", "chunk"])
def _weight_gradients(
    d_h,
    retrieved,
    updates,
    coefficients,
    mixing,
    masses,
    scored,
    projected,
    partial,
    tokens: tl.int64,
    count,
    chunk,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    STREAMS: tl.constexpr,
    LIVE: tl.constexpr,
    GATED: tl.constexpr,
    NORMED: tl.constexpr,
    D: tl.constexpr,
    SUMS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The chunk's share of dW_α, dW_β (each 2×2 rows), dW_ρ (2), dq (O), dw of the norm (1), as far as they exist."""
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    first = tl.program_id(1).to(tl.int64) * chunk
    sums = zeros(SUMS, TOKENS, WIDTH)
    for start in range(first, tl.minimum(first + chunk, tokens), TOKENS):
        token = start + tl.arange(0, TOKENS)
        present = token < tokens
        mask = present[:, None] & (column < D)[None, :]
        at = token[:, None] * D + column[None, :]
        streams = widened(stream_rows(retrieved, tokens, at, mask, D, len(KEY)))
        if LIVE:
            live = combine(updates, coefficients, count, tokens, token, present, at, mask, STREAMS, TOKENS, WIDTH)
            merged = ()
            for o in tl.static_range(len(KEY)):
                mass = tl.load(masses + o * tokens + token, present, other=0.0)[:, None]
                merged = merged + (mass * streams[o] + (1 - mass) * live[VALUE[o]],)
            streams = merged
        terms = ()
        if GATED:
            for n in tl.static_range(4):
                factor = tl.load(projected + n * tokens + token, present, other=0.0)[:, None]
                terms = terms + (factor * streams[0], factor * streams[1])
            if LIVE:
                factor = tl.load(projected + 4 * tokens + token, present, other=0.0)[:, None]
                terms = terms + (factor * live[0], factor * live[1])
        if LIVE:
            for o in tl.static_range(len(KEY)):
                terms = terms + (tl.load(scored + o * tokens + token, present, other=0.0)[:, None] * live[KEY[o]],)
        if NORMED:
            row = tl.zeros([TOKENS, WIDTH], tl.float32)
            for o in tl.static_range(len(KEY)):
                row += tl.load(mixing + o * tokens + token, present, other=0.0)[:, None] * streams[o]
            terms = terms + (row * tl.load(d_h + at, mask, other=0.0).to(tl.float32),)
        sums = added(sums, terms)
    for n in tl.static_range(SUMS):
        place = partial + (tl.program_id(1).to(tl.int64) * SUMS + n) * D + column
        tl.store(place, tl.sum(sums[n], 0), column < D)
