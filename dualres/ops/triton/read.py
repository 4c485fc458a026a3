"""Phase 2 on a GPU: what a branch of DAR or AttnRes reads, in one pass that loads each of its rows once."""
# N tokens  D width  J stored streams  O output streams  K updates  G gate values
# ruff: noqa: N803
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualres.ops.arguments import ReadArguments
from dualres.ops.triton.common import combine, inverse_rms, launch, parameter, pointers, rows, stream_rows


def read(given: ReadArguments) -> tuple[Tensor, Tensor]:
    """`autograd.read`."""
    retrieved, partition, updates, coefficients, queries, gates, norm, key, value, eps, norm_eps = given
    tokens, width = partition[0].numel(), retrieved.shape[-1]
    h = torch.empty_like(retrieved[0])
    next_coefficients = partition.new_empty(len(updates) + 1, *partition.shape) if gates else partition.new_empty(0)
    tile = rows(width)
    launch(
        _read,
        tile.grid(tokens),
        retrieved,
        partition,
        pointers(updates or [retrieved]),
        coefficients,
        queries,
        tuple(gates),
        norm,
        h,
        next_coefficients,
        tokens,
        len(updates),
        eps,
        norm_eps,
        KEY=tuple(key),
        VALUE=tuple(value),
        STREAMS=stored_streams(coefficients, key, value),
        LIVE=bool(updates),
        D=width,
        TOKENS=tile.tokens,
        WIDTH=tile.width,
        warps=tile.warps,
    )
    return h, next_coefficients


def stored_streams(coefficients: Tensor | None, key: list[int], value: list[int]) -> int:
    """J, which without a live state only the route tells."""
    return max(*key, *value) + 1 if coefficients is None else coefficients.shape[1]


@triton.jit
def _project(streams, weight, column, D: tl.constexpr):
    """Σ_j x^j · W^j, one gate value."""
    total = tl.sum(streams[0] * parameter(weight, column, D), 1)
    for j in tl.static_range(1, len(streams)):
        total += tl.sum(streams[j] * parameter(weight + j * D, column, D), 1)
    return total


@triton.jit
def open_gates(streams, scale, gate, COUNT: tl.constexpr, column, D: tl.constexpr):
    """x W and σ(scale · x̄ W + bias), tuples over the gate values; `scale` is the inverse norm of the streams."""
    projected, opened = (), ()
    for g in tl.static_range(COUNT):
        e = _project(streams, gate[0] + g * len(streams) * D, column, D)
        projected = projected + (e,)
        opened = opened + (tl.sigmoid(tl.load(gate[1]) * scale * e + tl.load(gate[2] + g)),)
    return projected, opened


@triton.jit
def merge(
    retrieved,
    live,
    partition,
    queries,
    eps,
    tokens,
    token,
    present,
    column,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    D: tl.constexpr,
):
    """λ = σ(ζ − a), h = λ h̃ + (1 − λ) v. -> rows h, λ, a, and the inverse norms of the keys, tuples over outputs"""
    merged, masses, logits, scales = (), (), (), ()
    for o in tl.static_range(len(KEY)):
        keys = live[KEY[o]]
        scale = tl.rsqrt(tl.sum(keys * keys, 1) / D + eps)
        logit = tl.sum(keys * parameter(queries + o * D, column, D), 1) * scale
        zeta = tl.load(partition + o * tokens + token, present, other=0.0)
        mass = tl.sigmoid(zeta - logit)
        merged = merged + (mass[:, None] * retrieved[o].to(tl.float32) + (1 - mass)[:, None] * live[VALUE[o]],)
        masses, logits, scales = masses + (mass,), logits + (logit,), scales + (scale,)
    return merged, masses, logits, scales


@triton.jit
def widened(streams):
    """The rows in float32."""
    made = ()
    for j in tl.static_range(len(streams)):
        made = made + (streams[j].to(tl.float32),)
    return made


@triton.jit(do_not_specialize=["tokens", "count"])
def _read(
    retrieved,
    partition,
    updates,
    coefficients,
    queries,
    gates,
    norm,
    h,
    next_coefficients,
    tokens: tl.int64,
    count,
    eps,
    norm_eps,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    STREAMS: tl.constexpr,
    LIVE: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """`reference.gated_read`, or without gates `reference.read`."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, WIDTH)
    present = token < tokens
    mask = present[:, None] & (column < D)[None, :]
    at = token[:, None] * D + column[None, :]
    streams = stream_rows(retrieved, tokens, at, mask, D, len(KEY))
    if LIVE:
        live = combine(updates, coefficients, count, tokens, token, present, at, mask, STREAMS, TOKENS, WIDTH)
        streams, _masses, _logits, _scales = merge(
            streams, live, partition, queries, eps, tokens, token, present, column, KEY, VALUE, D
        )
    else:
        streams = widened(streams)
    mixed = streams[0]
    if len(gates) > 0:
        scale = inverse_rms(streams, eps, D)
        _, alpha = open_gates(streams, scale, gates[0:3], 2, column, D)
        _, half_beta = open_gates(streams, scale, gates[3:6], 2, column, D)
        mixed = alpha[0][:, None] * streams[0] + alpha[1][:, None] * streams[1]
        for j in tl.static_range(2):
            tl.store(next_coefficients + (count * 2 + j) * tokens + token, 2 * half_beta[j], present)
        if LIVE:
            _, rho = open_gates(live, inverse_rms(live, eps, D), gates[6:9], 1, column, D)
            for k in range(0, count):
                place = k * 2 * tokens + token
                first = tl.load(coefficients + place, present, other=0.0)
                second = tl.load(coefficients + place + tokens, present, other=0.0)
                tl.store(next_coefficients + place, rho[0] * first + (1 - rho[0]) * second, present)
                tl.store(next_coefficients + place + tokens, (1 - rho[0]) * first + rho[0] * second, present)
    if norm is not None:
        mixed = mixed * inverse_rms((mixed,), norm_eps, D)[:, None] * parameter(norm, column, D)
    tl.store(h + at, mixed.to(h.dtype.element_ty), mask)
