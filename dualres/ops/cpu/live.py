"""The live streams, written as a state, on a CPU."""
# N tokens  D width  J stored streams  K updates

import math
from typing import Any, NamedTuple

from numba import types
from torch import Tensor

from dualres.ops.arguments import WriteArguments
from dualres.ops.cpu import lanes
from dualres.ops.cpu.compiler import compiled
from dualres.ops.cpu.lanes import LANES, fma, get, number_at, put, spread, total, whole_vectors
from dualres.ops.cpu.launch import address_of, kernel, unpack
from dualres.ops.cpu.pointers import integers, pointer, prefetch_to_write, size_of
from dualres.ops.cpu.tiles import AHEAD, coefficient_at, read_ahead, stream_at


class WriteInputs(NamedTuple):
    """Of a write or of its backward pass: addresses, 0 for a tensor that is absent, and numbers."""

    updates: list[int]  # backward, those with gradients of their own
    coefficients: int
    terms: int  # K
    streams: int
    tokens: int
    width: int
    live: int  # backward, its gradient
    carried: int
    d_updates: list[int]
    d_coefficients: int


def _write_inputs(arguments: WriteArguments, live: Tensor, gradients: WriteArguments | None) -> WriteInputs:
    count, streams, *tokens = arguments.coefficients.shape
    return WriteInputs(
        [update.data_ptr() for update in arguments.updates],
        arguments.coefficients.data_ptr(),
        count,
        streams,
        math.prod(tokens),
        live.shape[-1],
        live.data_ptr(),
        arguments.carried,
        [] if gradients is None else [update.data_ptr() for update in gradients.updates],
        0 if gradients is None else address_of(gradients.coefficients),
    )


def write(arguments: WriteArguments, results: list[Tensor]) -> None:
    inputs = _write_inputs(arguments, results[0], None)
    _write(inputs, inputs.tokens, results[0].dtype)


@kernel(WriteInputs)
def _write(first: int, last: int, _: int, scratch: int, table: int, kind: Any) -> None:
    inputs = unpack(table, WriteInputs)
    updates, coefficients = integers(inputs.updates), inputs.coefficients
    for t in range(first, last):
        for j in range(inputs.streams):
            row = stream_at(inputs.live, j, t, inputs, kind)
            for d in range(0, inputs.width, LANES):
                x = spread(0.0)
                at, left = d * size_of(kind), inputs.width - d
                prefetch_to_write(row + at + AHEAD)
                for k in range(inputs.terms):
                    u = read_ahead(stream_at(updates[k], 0, t, inputs, kind) + at, kind, left)
                    x = fma(number_at(coefficient_at(coefficients, k, j, t, inputs), 0), u, x)
                lanes.write(row + at, kind, left, x)


def write_backward(d_live: Tensor, arguments: WriteArguments, gradients: WriteArguments) -> None:
    inputs = _write_inputs(arguments, d_live, gradients)
    _write_backward(inputs, inputs.tokens, d_live.dtype, whole_vectors(inputs.width))


@compiled
def _set_coefficient(k: int, j: int, t: int, value: float, inputs: Any) -> None:
    """The gradient of C_k^j of a token."""
    pointer(coefficient_at(inputs.d_coefficients, k, j, t, inputs), types.float32)[0] = value


@compiled
def _pair_backward(t: int, k: int, j: int, partial: int, inputs: Any, kind: Any) -> None:
    """Streams j and j + 1 in du_k = Σ_j C_k^j dP^j, summed over pairs in a row; dC_k^j = u_k · dP^j if learned."""
    other, learned, n = min(j + 1, inputs.streams - 1), inputs.d_coefficients != 0, k - inputs.carried
    row, other_row = stream_at(inputs.live, j, t, inputs, kind), stream_at(inputs.live, other, t, inputs, kind)
    a, b = number_at(coefficient_at(inputs.coefficients, k, j, t, inputs), 0), spread(0.0)
    if other != j:
        b = number_at(coefficient_at(inputs.coefficients, k, other, t, inputs), 0)
    d_update = stream_at(integers(inputs.d_updates)[n], 0, t, inputs, kind)
    update = stream_at(integers(inputs.updates)[n], 0, t, inputs, kind) if learned else row
    product = other_product = spread(0.0)
    for d in range(0, inputs.width, LANES):
        at, left = d * size_of(kind), inputs.width - d
        prefetch_to_write(d_update + at + AHEAD)
        x, y = read_ahead(row + at, kind, left), read_ahead(other_row + at, kind, left)
        if learned:
            u = read_ahead(update + at, kind, left)
            product, other_product = fma(u, x, product), fma(u, y, other_product)
        z = a * x
        if other != j:
            z = fma(b, y, z)
        if j > 0:
            z = z + get(partial, d)
        if j + 2 < inputs.streams:
            put(partial, d, z)
        else:
            lanes.write(d_update + at, kind, left, z)
    if learned:
        _set_coefficient(k, j, t, total(product, LANES), inputs)
        _set_coefficient(k, other, t, total(other_product, LANES), inputs)


@kernel(WriteInputs)
def _write_backward(first: int, last: int, _: int, scratch: int, table: int, kind: Any) -> None:
    inputs = unpack(table, WriteInputs)
    for t in range(first, last):
        for k in range(inputs.carried if inputs.d_coefficients != 0 else 0):
            for j in range(inputs.streams):
                _set_coefficient(k, j, t, 0.0, inputs)
        for k in range(inputs.carried, inputs.terms):
            for j in range(0, inputs.streams, 2):
                _pair_backward(t, k, j, scratch, inputs, kind)
