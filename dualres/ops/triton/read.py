"""Phase 2 on a GPU: what a branch of DAR or AttnRes reads, in one pass that loads each of its rows once."""
# N tokens  D width  J stored streams  O output streams  K updates  G gate values
# ruff: noqa: N803
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, assignment"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualres.ops.arguments import ReadArguments
from dualres.ops.triton import tiles
from dualres.ops.triton.launch import launch, pointers, rows


def read(given: ReadArguments) -> tuple[Tensor, Tensor]:
    """`autograd.read`."""
    tokens, partition = given.retrieved[0, ..., 0].numel(), given.log_partition
    h = torch.empty_like(given.retrieved[0])
    next_coefficients = partition.new_empty((len(given.updates) + 1, *partition.shape) if given.gates else 0)
    tiling, (packed, constants) = rows(tokens, h.shape[-1]), pack(given)
    launch(_read, tiling, packed, h, next_coefficients, tokens, len(given.updates), **constants)
    return h, next_coefficients


def pack(given: ReadArguments) -> tuple[Any, dict[str, Any]]:
    """As a kernel takes it: tuples for lists; as constants the route and the number of live streams, or 0."""
    tuples: Any = {"updates": pointers(given.updates), "gates": tuple(given.gates), "key": None, "value": None}
    streams = 0 if given.coefficients is None else given.coefficients.shape[1]
    return given._replace(**tuples), {"KEY": tuple(given.key), "VALUE": tuple(given.value), "STREAMS": streams}


class Gate(NamedTuple):
    """One gate of a tile's tokens, in tuples over its values."""

    scale: Any  # the inverse norm of the streams that it is a function of
    projected: Any  # x W
    opened: Any  # σ(scale of the gate · x̄ W + bias)


class Forward(NamedTuple):
    """What a read computes for a tile, in tuples over streams; empty without a live state or gates."""

    stored: Any  # h̃, as stored
    live: Any  # P
    masses: Any  # λ
    logits: Any  # a
    key_scales: Any  # the inverse norms of the keys
    streams: Any  # h̃ and the live state merged
    alpha: Any
    beta: Any  # its half: a `Gate` without the factor 2
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
    """The `Gate` of `COUNT` values with these parameters: weight, scale, bias."""
    projected, opened = (), ()
    for g in tl.static_range(COUNT):
        e = _project(streams, parameters[0] + g * len(streams) * tile.D, tile)
        projected = projected + (e,)
        opened = opened + (tl.sigmoid(tl.load(parameters[1]) * scale * e + tl.load(parameters[2] + g)),)
    return Gate(scale, projected, opened)


@triton.jit
def merge(stored, live, masses, VALUE: tl.constexpr):
    """λ h̃ + (1 − λ) v for every output stream; without a live state h̃ alone."""
    streams = ()
    for o in tl.static_range(len(VALUE)):
        row = stored[o].to(tl.float32)
        if len(live) > 0:
            row = masses[o][:, None] * row + (1 - masses[o])[:, None] * live[VALUE[o]]
        streams = streams + (row,)
    return streams


@triton.jit
def forward(given, count, tile, KEY: tl.constexpr, VALUE: tl.constexpr, STREAMS: tl.constexpr):
    """λ = σ(ζ − a), the merged streams, α and β of these, and what they mix for the branch."""
    stored = tiles.load_streams(given.retrieved, tile, len(KEY))
    live = tiles.combine(given.updates, given.coefficients, count, tile, STREAMS)
    masses, logits, key_scales = (), (), ()
    if STREAMS > 0:
        for o in tl.static_range(len(KEY)):
            keys = live[KEY[o]]
            scale = tiles.inverse_rms((keys,), given.eps, tile.D)
            logit = tl.sum(keys * tiles.parameter(given.query + o * tile.D, tile), 1) * scale
            mass = tl.sigmoid(tiles.load_number(given.log_partition, o, tile) - logit)
            masses, logits, key_scales = masses + (mass,), logits + (logit,), key_scales + (scale,)
    streams = merge(stored, live, masses, VALUE)
    alpha, beta, mixed = (), (), streams[0]
    if len(given.gates) > 0:
        scale = tiles.inverse_rms(streams, given.eps, tile.D)
        alpha = open_gate(streams, scale, given.gates[0:3], 2, tile)
        beta = open_gate(streams, scale, given.gates[3:6], 2, tile)
        mixed = alpha.opened[0][:, None] * streams[0] + alpha.opened[1][:, None] * streams[1]
    return Forward(stored, live, masses, logits, key_scales, streams, alpha, beta, mixed)


@triton.jit
def transported(coefficients, k, rho, tile):
    """M(ρ) C_k with M = [[ρ, 1-ρ], [1-ρ, ρ]]."""
    first, second = tiles.load_number(coefficients, 2 * k, tile), tiles.load_number(coefficients, 2 * k + 1, tile)
    return rho * first + (1 - rho) * second, (1 - rho) * first + rho * second


@triton.jit(do_not_specialize=["tokens", "count"])
def _read(
    given,
    h,
    next_coefficients,
    tokens: tl.int64,
    count,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    STREAMS: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """`reference.gated_read`, or without gates `reference.read`."""
    tile = tiles.rows_of_program(tokens, D, TOKENS, WIDTH)
    made = forward(given, count, tile, KEY, VALUE, STREAMS)
    if len(given.gates) > 0:
        for j in tl.static_range(2):
            tiles.store_number(next_coefficients, 2 * count + j, tile, 2 * made.beta.opened[j])
        if STREAMS > 0:
            rho = open_gate(made.live, tiles.inverse_rms(made.live, given.eps, D), given.gates[6:9], 1, tile)
            for k in range(0, count):
                first, second = transported(given.coefficients, k, rho.opened[0], tile)
                tiles.store_number(next_coefficients, 2 * k, tile, first)
                tiles.store_number(next_coefficients, 2 * k + 1, tile, second)
    tiles.store_row(h, tile, tiles.norm_forward(made.mixed, given.norm, given.norm_eps, tile))
