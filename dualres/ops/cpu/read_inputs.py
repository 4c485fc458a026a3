"""What both reads on a CPU share, with gates and without: their inputs, the buffers of a tile, the branch's norm."""
# N tokens  D width  J stored streams  O output streams  K updates

import math
from typing import Any, NamedTuple

from torch import Tensor

from dualres.ops.arguments import ReadArguments
from dualres.ops.cpu.compiler import compiled
from dualres.ops.cpu.lanes import LANES, fma, get, number_at, put, spread, sums, whole_vectors, write
from dualres.ops.cpu.launch import address_of
from dualres.ops.cpu.pointers import size_of
from dualres.ops.cpu.tiles import SQUARE, read_ahead

TILE = 4096  # numbers in one row of every token of a tile: all rows of a tile fit the second cache


class ReadInputs(NamedTuple):
    """Of a read or of its backward pass: addresses, 0 for a tensor that is absent, and numbers."""

    retrieved: int
    partition: int
    updates: list[int]
    coefficients: int
    query: int
    gates: list[int]  # weight, scale and bias of α, β and ρ
    norm: int
    key: list[int]
    value: list[int]
    terms: int  # K
    streams: int
    tokens: int
    width: int
    stride: int  # from one row of a buffer to the next
    eps: float
    norm_eps: float
    h: int  # backward, its gradient
    next_coefficients: int  # backward, their gradient
    d_after: int  # the gradient of what the carrier after the read stands for
    d_other: int  # the gradient of the retrieved states from later reads
    carried: int
    d_retrieved: int
    d_partition: int
    d_updates: list[int]
    d_coefficients: int
    d_carrier: int


def read_inputs(arguments: ReadArguments, h: Tensor, next_coefficients: Tensor, *backward: Any) -> ReadInputs:
    retrieved, coefficients = arguments.retrieved, arguments.coefficients
    gates = [parameter.data_ptr() for parameter in arguments.gates]
    width = retrieved.shape[-1]
    return ReadInputs(
        retrieved.data_ptr(),
        arguments.log_partition.data_ptr(),
        [update.data_ptr() for update in arguments.updates],
        address_of(coefficients),
        address_of(arguments.query),
        [*gates, *[0] * (9 - len(gates))],
        address_of(arguments.norm),
        arguments.key,
        arguments.value,
        len(arguments.updates),
        0 if coefficients is None else coefficients.shape[1],
        math.prod(retrieved.shape[1:-1]),
        width,
        whole_vectors(width),
        arguments.eps,
        arguments.norm_eps,
        h.data_ptr(),
        next_coefficients.data_ptr(),
        *(backward or (0, 0, 0, 0, 0, [], 0, 0)),
    )


@compiled
def is_backward(inputs: Any) -> bool:
    return inputs.d_retrieved != 0


class Sizes(NamedTuple):
    """How many there are in the buffers of a read."""

    rows: int  # of a token
    parts: int  # sums over the width that a loop computes
    numbers: int  # of a token
    parameters: int  # rows


class Buffers(NamedTuple):
    """The addresses of float32 numbers in a part's own memory."""

    rows: int  # (tile,row)
    parts: int  # (·,LANES,LANES), of sums
    numbers: int  # (·,LANES)
    parameters: int  # (·,stride)
    gradients: int  # (·,stride), of the parameters, backward


def scratch_of(inputs: ReadInputs, sizes: Sizes, backward: bool) -> int:
    """The size of a part's own memory."""
    rows = _tile(inputs.stride) * _row(inputs.stride, sizes.rows)
    return rows + sizes.parts * SQUARE + sizes.numbers * LANES + (1 + backward) * sizes.parameters * inputs.stride


def _tile(stride: int) -> int:
    return max(4, min(LANES, TILE // stride))


def _row(stride: int, rows: int) -> int:
    return rows * stride + LANES  # no power of two: otherwise tokens would evict each other from the cache


tile_of, row_of = compiled(_tile), compiled(_row)


@compiled
def buffers_at(memory: int, stride: int, sizes: Any) -> Any:
    """The buffers in a part's own memory."""
    parts = memory + 4 * tile_of(stride) * row_of(stride, sizes.rows)
    numbers = parts + 4 * sizes.parts * SQUARE
    parameters = numbers + 4 * sizes.numbers * LANES
    return Buffers(memory, parts, numbers, parameters, parameters + 4 * sizes.parameters * stride)


@compiled
def clear_gradients(buffers: Any, sizes: Any, inputs: Any) -> None:
    """Set the gradients of the parameters' rows to zero."""
    for d in range(0, sizes.parameters * inputs.stride, LANES):
        put(buffers.gradients, d, spread(0.0))


@compiled
def write_branch_input(
    mixed: int, row: int, factors: int, norm: int, begin: int, tokens: int, inputs: Any, kind: Any
) -> None:
    """The branch input of a tile from its rows before the norm, the inverse norms, and the norm's weight if any."""
    for t in range(tokens):
        factor = number_at(factors, t)
        for d in range(0, inputs.width, LANES):
            x = get(mixed, t * row + d)
            if inputs.norm != 0:
                x = x * factor * get(norm, d)
            write(inputs.h + ((begin + t) * inputs.width + d) * size_of(kind), kind, inputs.width - d, x)


@compiled
def norm_shrink(
    mixed: int, row: int, factors: int, norm: int, parts: int, begin: int, tokens: int, inputs: Any, kind: Any
) -> Any:
    """The factor of −m in the gradient of a tile's rows m before the norm."""
    gradient = inputs.h + begin * inputs.width * size_of(kind)
    for t in range(tokens):
        product = spread(0.0)
        for d in range(0, inputs.width, LANES):
            x = read_ahead(gradient + (t * inputs.width + d) * size_of(kind), kind, inputs.width - d)
            product = fma(x * get(mixed, t * row + d), get(norm, d), product)
        put(parts, t * LANES, product)
    factor = get(factors, 0)
    return factor * factor * factor * sums(parts, 0) / inputs.width


@compiled
def add_rows(into: int, rows: int, row: int, tokens: int, inputs: Any) -> None:
    """Add a row of every token of a tile to a row of gradients."""
    for d in range(0, inputs.stride, LANES):
        x = get(into, d)
        for t in range(tokens):
            x = x + get(rows, t * row + d)
        put(into, d, x)
