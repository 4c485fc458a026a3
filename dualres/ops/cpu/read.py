"""Reads (phase 2) on a CPU; those with gates run in `gated_read`.

A read computes a token's live streams, merge, branch input and norm while its rows are in the cache, in a few loops
over the width. Numbers are float32; gradients of parameters are summed over CHUNK tokens in float32, and these sums in
float64.
"""
# N tokens  D width  J stored streams  O output streams  K updates

import math
from typing import Any, NamedTuple

import numpy as np
from numba import types
from torch import Tensor

from dualres.ops.arguments import ReadArguments
from dualres.ops.cpu.compiler import compiled
from dualres.ops.cpu.gated_read import gated_read, gated_read_backward, gated_scratch
from dualres.ops.cpu.launch import address_of, kernel, unpack
from dualres.ops.cpu.live import sum_updates, update_backward
from dualres.ops.cpu.loops import LANES, loop
from dualres.ops.cpu.read_inputs import ReadInputs, read_inputs
from dualres.ops.cpu.rows import floats, integers, pointer, prefetch_row_to_write, row_at

CHUNK = 64
ZERO, ONE = np.float32(0), np.float32(1)


def read(arguments: ReadArguments, results: list[Tensor]) -> None:
    inputs = read_inputs(arguments, *results)
    if arguments.gates:
        gated_read(inputs, inputs.tokens, arguments.retrieved.dtype, gated_scratch(inputs, backward=False))
    else:
        _read(inputs, inputs.tokens, arguments.retrieved.dtype, ROWS * _row_size(inputs.width))


def read_backward(
    d_h: Tensor,
    d_next: Tensor,
    d_live: Tensor | None,
    d_retrieved: Tensor | None,
    arguments: ReadArguments,
    gradients: ReadArguments,
) -> None:
    inputs = read_inputs(
        arguments,
        d_h,
        d_next,
        address_of(d_live),
        address_of(d_retrieved),
        arguments.carried,
        gradients.retrieved.data_ptr(),
        address_of(gradients.log_partition),
        [update.data_ptr() for update in gradients.updates],
        address_of(gradients.coefficients),
        address_of(gradients.carrier),
    )
    rows = [gradients.query, *gradients.gates[::3], gradients.norm]
    sums = [*rows, *gradients.gates[1::3], *gradients.gates[2::3]]
    if arguments.gates:
        scratch = gated_scratch(inputs, backward=True)
        gated_read_backward(inputs, inputs.tokens, arguments.retrieved.dtype, scratch, sums)
    else:
        scratch = (BACKWARD_ROWS + PARAMETER_ROWS) * _row_size(inputs.width)
        _read_backward(inputs, inputs.tokens, arguments.retrieved.dtype, scratch, sums)


# Rows of scratch: two live streams, and the branch input before its norm; backward, these then hold their gradients,
# and there is a row of zeros, and after it the gradients of query and norm.
ROWS, BACKWARD_ROWS, PARAMETER_ROWS = 3, 4, 2


def _row_size(width: int) -> int:
    """The numbers from one row of scratch to the next: no power of two, so that rows do not evict each other."""
    return -(-width // LANES) * LANES + LANES


@compiled
def _place(scratch: int, n: int, width: int) -> int:
    """The address of row n of the scratch."""
    return scratch + 4 * n * ((width + LANES - 1) // LANES * LANES + LANES)


@compiled
def _row(scratch: int, n: int, width: int) -> Any:
    return floats(_place(scratch, n, width))


@compiled
def _two_rows(scratch: int, n: int, width: int) -> Any:
    return _row(scratch, n, width), _row(scratch, n + 1, width)


@compiled
def _clear(scratch: int, count: int, width: int) -> None:
    """Set the first rows of the scratch to zero."""
    for n in range(count):
        row = _row(scratch, n, width)
        for d in range(width):
            row[d] = ZERO


@compiled
def _flush(sums: int, scratch: int, count: int, width: int) -> None:
    """Add the gradients of the parameters' rows to the sums, which begin with them, and set them to zero."""
    total = pointer(sums, types.float64)
    for n in range(count):
        row = _row(scratch, BACKWARD_ROWS + n, width)
        for d in range(width):
            total[n * width + d] += row[d]
            row[d] = ZERO


@compiled
def _pick(two: Any, n: int) -> Any:
    return two[1] if n == 1 else two[0]


@compiled
def _inverse_norm(square: Any, size: int, eps: float) -> Any:
    """1 / √(mean x² + eps) of `size` numbers whose squares sum to `square`."""
    return ONE / math.sqrt(square / np.float32(size) + np.float32(eps))


@compiled
def _shrink(norm: Any, product: Any, size: int) -> Any:
    """The factor of −x in its gradient through its inverse norm, from Σ x · (the gradient of x · norm)."""
    return norm * norm * norm * product / np.float32(size)


@compiled
def _sigmoids(x: Any) -> Any:
    """σ(x) and 1 − σ(x)"""
    small = math.exp(-abs(x))
    larger = ONE / (ONE + small)
    return (small * larger, larger) if x < 0 else (larger, small * larger)


@compiled
def _given(address: int, row: int, zero: Any, inputs: Any, kind: Any) -> Any:
    """A row of an incoming gradient, or the row of zeros without one."""
    return row_at(address, row, inputs.width, kind) if address != 0 else zero


@loop
def square(row: Any) -> Any:
    return row * row


@loop
def scale(into: Any, factor: Any, row: Any, weight: Any) -> None:
    into.set(factor * row * weight)


@loop
def key_products(key: Any, query: Any) -> Any:
    return key * key, key * query


class Merge(NamedTuple):
    """h = λ h̃ + (1 − λ) v"""

    retrieved: Any
    own: Any  # λ
    value: Any
    rest: Any  # 1 − λ


def _merged(merge: Any) -> Any:
    return merge.own * merge.retrieved + merge.rest * merge.value


@loop
def store_merged(into: Any, merge: Any) -> Any:
    """-> |h|²"""
    h = into.set(_merged(merge))
    return h * h


@kernel(ReadInputs)
def _read(first: int, last: int, sums: int, scratch: int, table: int, kind: Any) -> None:
    inputs = unpack(table, ReadInputs)
    width, norm, norm_eps = inputs.width, floats(inputs.norm), inputs.norm_eps
    live, mixed = _two_rows(scratch, 0, width), _row(scratch, 2, width)
    _clear(scratch, 2, width)  # which they remain without updates
    key, value = _pick(live, integers(inputs.key)[0]), _pick(live, integers(inputs.value)[0])
    for t in range(first, last):
        row, h = row_at(inputs.retrieved, t, width, kind), row_at(inputs.h, t, width, kind)
        prefetch_row_to_write(inputs.h, t, width, kind)
        if inputs.terms == 0 and inputs.norm != 0:
            scale(width, h, _inverse_norm(square(width, row), width, norm_eps), row, norm)
            continue
        own, rest, _, _ = _weigh(t, live, key, inputs, kind)
        merge = Merge(row, own, value, rest)
        if inputs.norm != 0:
            scale(width, h, _inverse_norm(store_merged(width, mixed, merge), width, norm_eps), mixed, norm)
        else:
            store_merged(width, h, merge)


@compiled
def _weigh(t: int, live: Any, key: Any, inputs: Any, kind: Any) -> Any:
    """Compute the live streams. -> λ, 1 − λ, q·Norm(P^key), the inverse norm of P^key"""
    if inputs.terms == 0:
        return ONE, ZERO, ZERO, ZERO
    if inputs.streams == 1:
        sum_updates(t, 0, (live[0],), (live[0],), inputs, kind)
    else:
        sum_updates(t, 0, live, live, inputs, kind)
    size, product = key_products(inputs.width, key, floats(inputs.query))
    norm = _inverse_norm(size, inputs.width, inputs.eps)
    own, rest = _sigmoids(floats(inputs.partition)[t] - product * norm)
    return own, rest, product * norm, norm


@loop
def row_norm_products(row: Any, norm: Any, gradient: Any) -> Any:
    """|x|² and Σ_d w x g"""
    return row * row, norm * row * gradient


@loop
def row_norm_backward(d_row: Any, row: Any, norm: Any, gradient: Any, d_norm: Any, numbers: Any, other: Any) -> None:
    factor, shrink = numbers
    d_norm.add(factor * row * gradient)
    d_row.set(factor * norm * gradient - shrink * row + other)


@loop
def norm_products(merge: Any, norm: Any, gradient: Any) -> Any:
    """|h|² and Σ_d w h g"""
    h = _merged(merge)
    return h * h, norm * h * gradient


@loop
def merge_backward(d_h: Any, d_row: Any, merge: Any, gradient: Any, normed: Any, other: Any) -> Any:
    """dh, through the norm if any, and dh̃ -> Σ_d dh (v − h̃)"""
    x = gradient
    if normed:
        norm, d_norm, factor, shrink = normed
        h = _merged(merge)
        d_norm.add(factor * h * gradient)
        x = factor * norm * gradient - shrink * h
    d_h.set(x)
    d_row.set(merge.own * x + other)
    return x * (merge.value - merge.retrieved)


class Stream(NamedTuple):
    """The weights of rows in the gradient of a live stream: as the value or not, as the key or not."""

    rest: Any  # of dh
    slope: Any  # of the query
    itself: Any


@loop
def stream_backward(live: Any, carrier: Any, stream: Any, d_h: Any, query: Any, d_query: Any, after: Any) -> None:
    """dP^j, which replaces P^j"""
    d_query.add(stream.slope * live)
    x = live.set(stream.rest * d_h + stream.slope * query + stream.itself * live + after)
    for row in carrier:
        row.set(x)


@kernel(ReadInputs)
def _read_backward(first: int, last: int, sums: int, scratch: int, table: int, kind: Any) -> None:
    inputs = unpack(table, ReadInputs)
    width, tokens, norm, query = inputs.width, inputs.tokens, floats(inputs.norm), floats(inputs.query)
    live, d_h, zero = (
        _two_rows(scratch, 0, width),
        _row(scratch, 2, width),
        pointer(_place(scratch, BACKWARD_ROWS - 1, width), kind),
    )
    d_norm_at = 1 if inputs.query != 0 else 0
    d_query, d_norm = _row(scratch, BACKWARD_ROWS, width), _row(scratch, BACKWARD_ROWS + d_norm_at, width)
    parameters = d_norm_at + (1 if inputs.norm != 0 else 0)
    _clear(scratch, BACKWARD_ROWS + parameters, width)
    coefficients, d_partition = floats(inputs.coefficients), floats(inputs.d_partition)
    key_stream, value_stream = integers(inputs.key)[0], integers(inputs.value)[0]
    key, value = _pick(live, key_stream), _pick(live, value_stream)
    for t in range(first, last):
        if (t - first) % CHUNK == CHUNK - 1:
            _flush(sums, scratch, parameters, width)
        row, d_row = row_at(inputs.retrieved, t, width, kind), row_at(inputs.d_retrieved, t, width, kind)
        gradient, other = row_at(inputs.h, t, width, kind), _given(inputs.d_other, t, zero, inputs, kind)
        prefetch_row_to_write(inputs.d_retrieved, t, width, kind)
        if inputs.terms == 0 and inputs.norm != 0:
            size, product = row_norm_products(width, row, norm, gradient)
            factor = _inverse_norm(size, width, inputs.norm_eps)
            numbers = factor, _shrink(factor, product, width)
            row_norm_backward(width, d_row, row, norm, gradient, d_norm, numbers, other)
            continue
        own, rest, score, key_norm = _weigh(t, live, key, inputs, kind)
        merge = Merge(row, own, value, rest)
        if inputs.norm != 0:
            size, product = norm_products(width, merge, norm, gradient)
            factor = _inverse_norm(size, width, inputs.norm_eps)
            normed = norm, d_norm, factor, _shrink(factor, product, width)
            d_rest = merge_backward(width, d_h, d_row, merge, gradient, normed, other)
        else:
            d_rest = merge_backward(width, d_h, d_row, merge, gradient, (), other)
        if inputs.terms == 0:
            continue
        d_score = d_rest * own * rest
        d_partition[t] = -d_score
        for j in range(inputs.streams):
            slope = d_score * key_norm if j == key_stream else ZERO
            itself = -slope * score * key_norm / np.float32(width)
            stream = Stream(rest if j == value_stream else ZERO, slope, itself)
            place = j * tokens + t
            after = _given(inputs.d_after, place, zero, inputs, kind)
            if inputs.d_carrier != 0:
                prefetch_row_to_write(inputs.d_carrier, place, width, kind)
                carrier = (row_at(inputs.d_carrier, place, width, kind),)
                stream_backward(width, _pick(live, j), carrier, stream, d_h, query, d_query, after)
            else:
                stream_backward(width, _pick(live, j), (), stream, d_h, query, d_query, after)
        for k in range(inputs.carried, inputs.terms):
            d_update = row_at(integers(inputs.d_updates)[k - inputs.carried], t, width, kind)
            prefetch_row_to_write(integers(inputs.d_updates)[k - inputs.carried], t, width, kind)
            at = k * inputs.streams * tokens + t
            if inputs.streams == 1:
                update_backward(width, d_update, (), (), (coefficients[at],), (live[0],))
            else:
                update_backward(width, d_update, (), (), (coefficients[at], coefficients[at + tokens]), live)
    _flush(sums, scratch, parameters, width)
