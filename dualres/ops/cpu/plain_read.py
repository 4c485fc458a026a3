"""The read without gates on a CPU, of AttnRes and `standard`: stream, merge and norm of a tile of tokens while cached.

Norms, weights and other single numbers of a token are computed for all tokens of the tile together.
"""
# N tokens  D width  J stored streams  K updates

from typing import Any

from numba import types

from dualres.ops.cpu.compiler import compiled
from dualres.ops.cpu.lanes import LANES, fma, get, inverse_rms, number_at, put, read, sigmoid, spread, sums, write
from dualres.ops.cpu.launch import kernel, unpack
from dualres.ops.cpu.pointers import integers, prefetch_to_write, size_of
from dualres.ops.cpu.read_inputs import (
    ReadInputs,
    Sizes,
    add_rows,
    buffers_at,
    clear_gradients,
    is_backward,
    norm_shrink,
    row_of,
    tile_of,
    write_branch_input,
)
from dualres.ops.cpu.tiles import FLUSH, SQUARE, add_to_sums, coefficient_at, copy_rows, read_ahead, stream_at

# Rows of parameters: the query, the norm's weight.
QUERY, NORM, PARAMETERS = 0, 1, 2
# Rows of a token: P^j, later dP^j; the branch input m before its norm, later dw; dm.
LIVE, MIXED, D_MIXED, ROWS = 0, 2, 3, 4
# Numbers of a token.
OWN, REST, SCORE, KEY_NORM, SLOPE, ITSELF, FACTOR, SHRINK = range(0, 8 * LANES, LANES)
PLAIN = Sizes(ROWS, parts=2, numbers=8, parameters=PARAMETERS)


@compiled
def _copy_parameters(buffers: Any, inputs: Any) -> None:
    width, stride = inputs.width, inputs.stride
    if inputs.terms > 0:
        copy_rows(buffers.parameters, QUERY * stride, inputs.query, 1, width, stride, types.float32)
    if inputs.norm != 0:
        copy_rows(buffers.parameters, NORM * stride, inputs.norm, 1, width, stride, types.float32)


@compiled
def _live_streams(buffers: Any, begin: int, tokens: int, inputs: Any, kind: Any) -> None:
    """P^j = Σ_k C_k^j u_k of a tile; parts of |P^key|² and q·P^key."""
    updates, rows, parts = integers(inputs.updates), buffers.rows, buffers.parts
    stride, size = inputs.stride, size_of(kind)
    row, key, offset = row_of(stride, ROWS), integers(inputs.key)[0], begin * inputs.width * size_of(kind)
    d_updates, fresh = integers(inputs.d_updates), inputs.terms - inputs.carried if is_backward(inputs) else 0
    for j in range(inputs.streams):
        carrier = stream_at(inputs.d_carrier, j, begin, inputs, kind)
        for t in range(tokens):
            square = score = spread(0.0)
            for d in range(0, inputs.width, LANES):
                x = spread(0.0)
                at, left = (t * inputs.width + d) * size, inputs.width - d
                for k in range(inputs.terms):
                    u = read_ahead(updates[k] + offset + at, kind, left)
                    x = fma(number_at(coefficient_at(inputs.coefficients, k, j, begin, inputs), t), u, x)
                if inputs.d_carrier != 0:
                    prefetch_to_write(carrier + at)
                for k in range(fresh):
                    prefetch_to_write(d_updates[k] + offset + at)
                put(rows, t * row + (LIVE + j) * stride + d, x)
                square, score = fma(x, x, square), fma(x, get(buffers.parameters, QUERY * stride + d), score)
            if j == key:
                put(parts, t * LANES, square)
                put(parts, SQUARE + t * LANES, score)


@compiled
def _weigh(buffers: Any, begin: int, tokens: int, inputs: Any) -> None:
    """λ and 1 − λ of a tile."""
    numbers = buffers.numbers
    norm = inverse_rms(sums(buffers.parts, 0), inputs.width, inputs.eps)
    score = sums(buffers.parts, SQUARE) * norm
    x = read(inputs.partition + 4 * begin, types.float32, tokens) - score
    put(numbers, OWN, sigmoid(x))
    put(numbers, REST, sigmoid(spread(0.0) - x))
    put(numbers, SCORE, score)
    put(numbers, KEY_NORM, norm)


@compiled
def _merged(buffers: Any, t: int, d: int, begin: int, live: int, written: int, inputs: Any, kind: Any) -> Any:
    rows, row = buffers.rows, row_of(inputs.stride, ROWS)
    at = (t * inputs.width + d) * size_of(kind)
    x = read_ahead(inputs.retrieved + begin * inputs.width * size_of(kind) + at, kind, inputs.width - d)
    prefetch_to_write(written + at)
    if inputs.terms > 0:
        own, rest = number_at(buffers.numbers, OWN + t), number_at(buffers.numbers, REST + t)
        x = fma(own, x, rest * get(rows, t * row + live + d))
    put(rows, t * row + MIXED * inputs.stride + d, x)
    return x


@compiled
def _merge(buffers: Any, begin: int, tokens: int, inputs: Any, kind: Any) -> None:
    """m = λ h̃ + (1 − λ) P^value of a tile, or h̃ without a live state, and the inverse norm of m."""
    numbers, stride = buffers.numbers, inputs.stride
    offset, live = begin * inputs.width * size_of(kind), (LIVE + integers(inputs.value)[0]) * stride
    written = (inputs.d_retrieved if is_backward(inputs) else inputs.h) + offset
    for t in range(tokens):
        square = square_too = spread(0.0)
        for d in range(0, inputs.width - LANES, 2 * LANES):
            x = _merged(buffers, t, d, begin, live, written, inputs, kind)
            y = _merged(buffers, t, d + LANES, begin, live, written, inputs, kind)
            square, square_too = fma(x, x, square), fma(y, y, square_too)
        if inputs.stride % (2 * LANES) != 0:
            x = _merged(buffers, t, inputs.stride - LANES, begin, live, written, inputs, kind)
            square = fma(x, x, square)
        put(buffers.parts, t * LANES, square + square_too)
    put(numbers, FACTOR, inverse_rms(sums(buffers.parts, 0), inputs.width, inputs.norm_eps))


@compiled
def _compute(buffers: Any, begin: int, tokens: int, inputs: Any, kind: Any) -> None:
    """All of a read but its output: forward, and again backward."""
    if inputs.terms > 0:
        _live_streams(buffers, begin, tokens, inputs, kind)
        _weigh(buffers, begin, tokens, inputs)
    _merge(buffers, begin, tokens, inputs, kind)


@kernel(ReadInputs)
def plain_read(first: int, last: int, _: int, scratch: int, table: int, kind: Any) -> None:
    inputs = unpack(table, ReadInputs)
    buffers, stride = buffers_at(scratch, inputs.stride, PLAIN), inputs.stride
    mixed, norm = buffers.rows + 4 * MIXED * stride, buffers.parameters + 4 * NORM * stride
    factors, row = buffers.numbers + 4 * FACTOR, row_of(stride, ROWS)
    _copy_parameters(buffers, inputs)
    for begin in range(first, last, tile_of(stride)):
        tokens = min(tile_of(stride), last - begin)
        _compute(buffers, begin, tokens, inputs, kind)
        write_branch_input(mixed, row, factors, norm, begin, tokens, inputs, kind)


@compiled
def _merge_backward(buffers: Any, begin: int, tokens: int, inputs: Any, kind: Any) -> None:
    """dm of a tile, through the norm if there is one, and dh̃; parts of dm·(P^value − h̃)."""
    rows, numbers, stride, row = buffers.rows, buffers.numbers, inputs.stride, row_of(inputs.stride, ROWS)
    norm, offset = buffers.parameters + 4 * NORM * stride, begin * inputs.width * size_of(kind)
    live = (LIVE + integers(inputs.value)[0]) * stride
    if inputs.norm != 0:
        mixed, factors = rows + 4 * MIXED * stride, numbers + 4 * FACTOR
        put(numbers, SHRINK, norm_shrink(mixed, row, factors, norm, buffers.parts, begin, tokens, inputs, kind))
    for t in range(tokens):
        d_rest = spread(0.0)
        own, factor = number_at(numbers, OWN + t), number_at(numbers, FACTOR + t)
        shrink = number_at(numbers, SHRINK + t)
        for d in range(0, inputs.width, LANES):
            place, at, left = offset + (t * inputs.width + d) * size_of(kind), t * row + d, inputs.width - d
            x = read(inputs.h + place, kind, left)
            if inputs.norm != 0:
                x, y = factor * x, get(rows, at + MIXED * stride)
                put(rows, at + MIXED * stride, x * y)  # dw
                x = x * get(norm, d) - shrink * y
            if inputs.terms > 0:
                put(rows, at + D_MIXED * stride, x)
                d_rest = fma(x, get(rows, at + live) - read(inputs.retrieved + place, kind, left), d_rest)
                x = own * x
            if inputs.d_other != 0:
                x = x + read_ahead(inputs.d_other + place, kind, left)
            write(inputs.d_retrieved + place, kind, left, x)
        put(buffers.parts, t * LANES, d_rest)


@compiled
def _score_backward(buffers: Any, begin: int, tokens: int, inputs: Any) -> None:
    """The gradient of the log-partition of a tile; the weights of the query and of P^key in the gradient of P^key."""
    numbers = buffers.numbers
    d_score = sums(buffers.parts, 0) * get(numbers, OWN) * get(numbers, REST)
    write(inputs.d_partition + 4 * begin, types.float32, tokens, spread(0.0) - d_score)
    slope = d_score * get(numbers, KEY_NORM)
    put(numbers, SLOPE, slope)
    put(numbers, ITSELF, spread(0.0) - slope * get(numbers, SCORE) * get(numbers, KEY_NORM) / inputs.width)


@compiled
def _add_query_gradient(buffers: Any, tokens: int, inputs: Any) -> None:
    rows, gradients, stride = buffers.rows, buffers.gradients, inputs.stride
    row, key = row_of(stride, ROWS), (LIVE + integers(inputs.key)[0]) * stride
    for d in range(0, stride, LANES):
        x = get(gradients, QUERY * stride + d)
        for t in range(tokens):
            x = fma(number_at(buffers.numbers, SLOPE + t), get(rows, t * row + key + d), x)
        put(gradients, QUERY * stride + d, x)


@compiled
def _stream_gradients(buffers: Any, begin: int, tokens: int, inputs: Any, kind: Any) -> None:
    """dP^j, which replaces P^j: through the value, through the key, and from later reads."""
    rows, numbers, stride, row = buffers.rows, buffers.numbers, inputs.stride, row_of(inputs.stride, ROWS)
    for j in range(inputs.streams):
        after = stream_at(inputs.d_after, j, begin, inputs, kind)
        carrier = stream_at(inputs.d_carrier, j, begin, inputs, kind)
        for t in range(tokens):
            rest = slope = itself = spread(0.0)
            if j == integers(inputs.value)[0]:
                rest = number_at(numbers, REST + t)
            if j == integers(inputs.key)[0]:
                slope, itself = number_at(numbers, SLOPE + t), number_at(numbers, ITSELF + t)
            for d in range(0, inputs.width, LANES):
                at, place = t * row + d, (t * inputs.width + d) * size_of(kind)
                x = itself * get(rows, at + (LIVE + j) * stride)
                x = fma(slope, get(buffers.parameters, QUERY * stride + d), x)
                x = fma(rest, get(rows, at + D_MIXED * stride), x)
                if inputs.d_after != 0:
                    x = x + read_ahead(after + place, kind, inputs.width - d)
                put(rows, at + (LIVE + j) * stride, x)
                if inputs.d_carrier != 0:
                    write(carrier + place, kind, inputs.width - d, x)


@compiled
def _update_gradients(buffers: Any, begin: int, tokens: int, inputs: Any, kind: Any) -> None:
    """du_k = Σ_j C_k^j dP^j of the terms with gradients of their own."""
    rows, stride, row = buffers.rows, inputs.stride, row_of(inputs.stride, ROWS)
    for k in range(inputs.carried, inputs.terms):
        d_update = stream_at(integers(inputs.d_updates)[k - inputs.carried], 0, begin, inputs, kind)
        for t in range(tokens):
            for d in range(0, inputs.width, LANES):
                x = spread(0.0)
                for j in range(inputs.streams):
                    c = number_at(coefficient_at(inputs.coefficients, k, j, begin, inputs), t)
                    x = fma(c, get(rows, t * row + (LIVE + j) * stride + d), x)
                write(d_update + (t * inputs.width + d) * size_of(kind), kind, inputs.width - d, x)


@compiled
def _flush(buffers: Any, totals: int, inputs: Any) -> None:
    """Add the gradients of the parameters' rows over some tiles to the sums, and start again."""
    if inputs.query != 0:
        add_to_sums(totals, buffers.gradients + 4 * QUERY * inputs.stride, inputs.width)
        totals += 8 * inputs.width
    if inputs.norm != 0:
        add_to_sums(totals, buffers.gradients + 4 * NORM * inputs.stride, inputs.width)
    clear_gradients(buffers, PLAIN, inputs)


@kernel(ReadInputs)
def plain_read_backward(first: int, last: int, totals: int, scratch: int, table: int, kind: Any) -> None:
    inputs = unpack(table, ReadInputs)
    buffers, stride = buffers_at(scratch, inputs.stride, PLAIN), inputs.stride
    flushed, tile, row = first, tile_of(stride), row_of(stride, ROWS)
    d_norm, d_weight = buffers.gradients + 4 * NORM * stride, buffers.rows + 4 * MIXED * stride
    _copy_parameters(buffers, inputs)
    clear_gradients(buffers, PLAIN, inputs)
    for begin in range(first, last, tile):
        tokens = min(tile, last - begin)
        _compute(buffers, begin, tokens, inputs, kind)
        _merge_backward(buffers, begin, tokens, inputs, kind)
        if inputs.norm != 0:
            add_rows(d_norm, d_weight, row, tokens, inputs)
        if inputs.terms > 0:
            _score_backward(buffers, begin, tokens, inputs)
            _add_query_gradient(buffers, tokens, inputs)
            _stream_gradients(buffers, begin, tokens, inputs, kind)
            _update_gradients(buffers, begin, tokens, inputs, kind)
        if begin + tokens - flushed >= FLUSH or begin + tokens == last:
            _flush(buffers, totals, inputs)
            flushed = begin + tokens
