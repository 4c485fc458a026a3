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


def read(arguments: ReadArguments) -> tuple[Tensor, Tensor]:
    tokens, partition = arguments.retrieved[0, ..., 0].numel(), arguments.log_partition
    h = torch.empty_like(arguments.retrieved[0])
    next_coefficients = partition.new_empty((len(arguments.updates) + 1, *partition.shape) if arguments.gates else 0)
    tiling, (packed, constants) = rows(tokens, h.shape[-1]), pack(arguments)
    launch(_read, tiling, packed, h, next_coefficients, tokens, len(arguments.updates), **constants)
    return h, next_coefficients


def pack(arguments: ReadArguments) -> tuple[Any, dict[str, Any]]:
    """The arguments as a kernel takes them: lists as tuples; the route and the number of live streams as constants."""
    tuples: Any = {"updates": pointers(arguments.updates), "gates": tuple(arguments.gates), "key": None, "value": None}
    streams = 0 if arguments.coefficients is None else arguments.coefficients.shape[1]
    constants = {"KEY": tuple(arguments.key), "VALUE": tuple(arguments.value), "STREAMS": streams}
    return arguments._replace(**tuples), constants


class Gate(NamedTuple):
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
    beta: Any  # β / 2: a `Gate` without the factor 2
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
    projected, outputs = (), ()
    for g in tl.static_range(COUNT):
        e = _project(streams, parameters[0] + g * len(streams) * tile.D, tile)
        projected = projected + (e,)
        outputs = outputs + (tl.sigmoid(tl.load(parameters[1]) * scale * e + tl.load(parameters[2] + g)),)
    return Gate(scale, projected, outputs)


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
    live = tiles.combine(arguments.updates, arguments.coefficients, count, tile, STREAMS)
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
def _read(
    arguments,
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
    """`reference.gated_read`, or `reference.read` without gates."""
    tile = tiles.rows_of_program(tokens, D, TOKENS, WIDTH)
    result = forward(arguments, count, tile, KEY, VALUE, STREAMS)
    if len(arguments.gates) > 0:
        for j in tl.static_range(2):
            tiles.store_number(next_coefficients, 2 * count + j, tile, 2 * result.beta.outputs[j])
        if STREAMS > 0:
            live_scale = tiles.inverse_rms(result.live, arguments.eps, D)
            rho = open_gate(result.live, live_scale, arguments.gates[6:9], 1, tile)
            for k in range(0, count):
                first, second = transported(arguments.coefficients, k, rho.outputs[0], tile)
                tiles.store_number(next_coefficients, 2 * k, tile, first)
                tiles.store_number(next_coefficients, 2 * k + 1, tile, second)
    tiles.store_row(h, tile, tiles.norm_forward(result.mixed, arguments.norm, arguments.norm_eps, tile))
