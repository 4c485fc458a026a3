"""The read of DAR on a CPU: streams, merge, gates, branch input and norm of a tile of tokens while it is cached.

Gates, norms and other single numbers of a token are computed for all tokens of the tile together.
"""
# N tokens  D width  K updates; both stored streams j and both output streams o have two rows

from typing import Any

from numba import types

from dualres.ops.cpu.compiler import compiled
from dualres.ops.cpu.lanes import (
    LANES,
    fma,
    get,
    inverse_rms,
    number_at,
    put,
    read,
    sigmoid,
    spread,
    sums,
    total,
    write,
)
from dualres.ops.cpu.launch import kernel, unpack
from dualres.ops.cpu.pointers import integers, pointer, prefetch_to_write, size_of
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

# Rows of parameters: q^o; W of the gate values α⁰, α¹, β⁰ and β¹ by output; W_ρ by stream; the norm's weight.
QUERY, GATES, RHO, NORM, PARAMETERS = 0, 2, 10, 12, 13
# Rows of a token: P^j, later dP^j; h^o, later dh^o; the branch input m before its norm, later dw; dm.
LIVE, H, MIXED, D_MIXED, ROWS = 0, 2, 4, 5, 6
# Numbers of a token: two by stream or output; four by gate value, or by stream and output; one.
SQUARES, OWN, REST, SCORES, KEY_NORMS, ITSELF = range(0, 12 * LANES, 2 * LANES)
PRODUCTS, VALUES, D_PRODUCTS, RESTS, SLOPES = range(12 * LANES, 32 * LANES, 4 * LANES)
(
    RHO_VALUE,
    RHO_NORM,
    RHO_PRODUCT,
    D_RHO_PRODUCT,
    CROSSED,
    GATE_NORM,
    SHRINK,
    FACTOR,
    NORM_SHRINK,
) = range(32 * LANES, 41 * LANES, LANES)
GATED = Sizes(ROWS, parts=6, numbers=41, parameters=PARAMETERS)


@compiled
def _copy_parameters(buffers: Any, inputs: Any) -> None:
    gates, width, stride, parameters = integers(inputs.gates), inputs.width, inputs.stride, buffers.parameters
    copy_rows(parameters, GATES * stride, gates[0], 4, width, stride, types.float32)
    copy_rows(parameters, (GATES + 4) * stride, gates[3], 4, width, stride, types.float32)
    if inputs.terms > 0:
        copy_rows(parameters, QUERY * stride, inputs.query, 2, width, stride, types.float32)
        copy_rows(parameters, RHO * stride, gates[6], 2, width, stride, types.float32)
    if inputs.norm != 0:
        copy_rows(parameters, NORM * stride, inputs.norm, 1, width, stride, types.float32)


@compiled
def _live_streams(buffers: Any, begin: int, tokens: int, inputs: Any, kind: Any) -> None:
    """P^j = Σ_k C_k^j u_k of a tile; parts of |P⁰|², |P¹|², q^o·P^key of both outputs, Σ_j P^j·W_ρ^j and, backward,
    (g⁰ − g¹)·(P⁰ − P¹) with the gradient g of M(ρ) P."""
    updates, coefficients, rows, stride = integers(inputs.updates), inputs.coefficients, buffers.rows, inputs.stride
    parameters, parts, row, size = buffers.parameters, buffers.parts, row_of(inputs.stride, ROWS), size_of(kind)
    key, other_key = integers(inputs.key)[0] * stride, integers(inputs.key)[1] * stride
    after = stream_at(inputs.d_after, 0, begin, inputs, kind)
    other_after = stream_at(inputs.d_after, 1, begin, inputs, kind)
    carrier = stream_at(inputs.d_carrier, 0, begin, inputs, kind)
    other_carrier = stream_at(inputs.d_carrier, 1, begin, inputs, kind)
    d_updates, fresh = integers(inputs.d_updates), inputs.terms - inputs.carried if is_backward(inputs) else 0
    for t in range(tokens):
        square = square_too = score = score_too = product = crossed = spread(0.0)
        for d in range(0, inputs.width, LANES):
            a = b = spread(0.0)
            at, left = (t * inputs.width + d) * size, inputs.width - d
            for k in range(inputs.terms):
                x = read_ahead(updates[k] + begin * inputs.width * size + at, kind, left)
                a = fma(number_at(coefficient_at(coefficients, k, 0, begin, inputs), t), x, a)
                b = fma(number_at(coefficient_at(coefficients, k, 1, begin, inputs), t), x, b)
            if inputs.d_carrier != 0:
                prefetch_to_write(carrier + at)
                prefetch_to_write(other_carrier + at)
            for k in range(fresh):
                prefetch_to_write(d_updates[k] + begin * inputs.width * size + at)
            live = t * row + LIVE * stride + d
            put(rows, live, a)
            put(rows, live + stride, b)
            square, square_too = fma(a, a, square), fma(b, b, square_too)
            score = fma(get(parameters, QUERY * stride + d), get(rows, live + key), score)
            score_too = fma(get(parameters, (QUERY + 1) * stride + d), get(rows, live + other_key), score_too)
            product = fma(a, get(parameters, RHO * stride + d), product)
            product = fma(b, get(parameters, (RHO + 1) * stride + d), product)
            if inputs.d_after != 0:
                x = read_ahead(after + at, kind, left) - read_ahead(other_after + at, kind, left)
                crossed = fma(x, a - b, crossed)
        put(parts, t * LANES, square)
        put(parts, SQUARE + t * LANES, square_too)
        put(parts, 2 * SQUARE + t * LANES, score)
        put(parts, 3 * SQUARE + t * LANES, score_too)
        put(parts, 4 * SQUARE + t * LANES, product)
        put(parts, 5 * SQUARE + t * LANES, crossed)


@compiled
def _weigh(buffers: Any, begin: int, tokens: int, inputs: Any) -> None:
    """λ and 1 − λ of both outputs, and ρ, of a tile."""
    parts, numbers, width, eps = buffers.parts, buffers.numbers, inputs.width, inputs.eps
    key, gates = integers(inputs.key), integers(inputs.gates)
    square, square_too = sums(parts, 0), sums(parts, SQUARE)
    put(numbers, SQUARES, square)
    put(numbers, SQUARES + LANES, square_too)
    for o in range(2):
        norm = inverse_rms(get(numbers, SQUARES + key[o] * LANES), width, eps)
        score = sums(parts, (2 + o) * SQUARE) * norm
        x = read(inputs.partition + 4 * (o * inputs.tokens + begin), types.float32, tokens) - score
        put(numbers, OWN + o * LANES, sigmoid(x))
        put(numbers, REST + o * LANES, sigmoid(spread(0.0) - x))
        put(numbers, SCORES + o * LANES, score)
        put(numbers, KEY_NORMS + o * LANES, norm)
    norm, product = inverse_rms(square + square_too, 2 * width, eps), sums(parts, 4 * SQUARE)
    put(numbers, RHO_NORM, norm)
    put(numbers, RHO_PRODUCT, product)
    put(numbers, RHO_VALUE, sigmoid(fma(number_at(gates[7], 0) * norm, product, number_at(gates[8], 0))))
    put(numbers, CROSSED, sums(parts, 5 * SQUARE))


@compiled
def _merge(buffers: Any, begin: int, tokens: int, inputs: Any, kind: Any) -> None:
    """h^o = λ h̃^o + (1 − λ) P^value of a tile; parts of Σ_o |h^o|² and of Σ_o h^o·W^o for each of the gate values."""
    rows, parameters, numbers, parts = buffers.rows, buffers.parameters, buffers.numbers, buffers.parts
    stride, row, value = inputs.stride, row_of(inputs.stride, ROWS), integers(inputs.value)
    one, two = stream_at(inputs.retrieved, 0, begin, inputs, kind), stream_at(inputs.retrieved, 1, begin, inputs, kind)
    live, other_live = LIVE * stride + value[0] * stride, LIVE * stride + value[1] * stride
    d_one = stream_at(inputs.d_retrieved, 0, begin, inputs, kind)
    d_two = stream_at(inputs.d_retrieved, 1, begin, inputs, kind)
    for t in range(tokens):
        square = a = b = c = e = spread(0.0)
        own, rest = number_at(numbers, OWN + t), number_at(numbers, REST + t)
        other_own, other_rest = number_at(numbers, OWN + LANES + t), number_at(numbers, REST + LANES + t)
        for d in range(0, inputs.width, LANES):
            at, left, weight = (t * inputs.width + d) * size_of(kind), inputs.width - d, GATES * stride + d
            x, y = read_ahead(one + at, kind, left), read_ahead(two + at, kind, left)
            if is_backward(inputs):
                prefetch_to_write(d_one + at)
                prefetch_to_write(d_two + at)
            else:
                prefetch_to_write(inputs.h + begin * inputs.width * size_of(kind) + at)
            if inputs.terms > 0:
                x = fma(own, x, rest * get(rows, t * row + live + d))
                y = fma(other_own, y, other_rest * get(rows, t * row + other_live + d))
            put(rows, t * row + H * stride + d, x)
            put(rows, t * row + (H + 1) * stride + d, y)
            square = fma(y, y, fma(x, x, square))
            a = fma(y, get(parameters, weight + stride), fma(x, get(parameters, weight), a))
            b = fma(y, get(parameters, weight + 3 * stride), fma(x, get(parameters, weight + 2 * stride), b))
            c = fma(y, get(parameters, weight + 5 * stride), fma(x, get(parameters, weight + 4 * stride), c))
            e = fma(y, get(parameters, weight + 7 * stride), fma(x, get(parameters, weight + 6 * stride), e))
        put(parts, t * LANES, square)
        put(parts, SQUARE + t * LANES, a)
        put(parts, 2 * SQUARE + t * LANES, b)
        put(parts, 3 * SQUARE + t * LANES, c)
        put(parts, 4 * SQUARE + t * LANES, e)


@compiled
def _compute_gates(buffers: Any, inputs: Any) -> None:
    """α⁰, α¹, β⁰ and β¹ of a tile."""
    numbers, gates = buffers.numbers, integers(inputs.gates)
    norm = inverse_rms(sums(buffers.parts, 0), 2 * inputs.width, inputs.eps)
    put(numbers, GATE_NORM, norm)
    for n in range(4):
        product, gate = sums(buffers.parts, (1 + n) * SQUARE), n // 2 * 3
        scale, bias = number_at(gates[gate + 1], 0), number_at(gates[gate + 2], n % 2)
        x = sigmoid(fma(scale * norm, product, bias))
        put(numbers, PRODUCTS + n * LANES, product)
        put(numbers, VALUES + n * LANES, x if n < 2 else x * 2)


@compiled
def _mix(buffers: Any, tokens: int, inputs: Any) -> None:
    """m = Σ_o α^o h^o of a tile, and its inverse norm."""
    rows, numbers, stride, row = buffers.rows, buffers.numbers, inputs.stride, row_of(inputs.stride, ROWS)
    for t in range(tokens):
        square = spread(0.0)
        one, two = number_at(numbers, VALUES + t), number_at(numbers, VALUES + LANES + t)
        for d in range(0, stride, LANES):
            at = t * row + d
            x = fma(one, get(rows, at + H * stride), two * get(rows, at + (H + 1) * stride))
            put(rows, at + MIXED * stride, x)
            square = fma(x, x, square)
        put(buffers.parts, t * LANES, square)
    put(numbers, FACTOR, inverse_rms(sums(buffers.parts, 0), inputs.width, inputs.norm_eps))


@compiled
def _compute(buffers: Any, begin: int, tokens: int, inputs: Any, kind: Any) -> None:
    """All of a read but its output: forward, and again backward."""
    if inputs.terms > 0:
        _live_streams(buffers, begin, tokens, inputs, kind)
        _weigh(buffers, begin, tokens, inputs)
    _merge(buffers, begin, tokens, inputs, kind)
    _compute_gates(buffers, inputs)
    _mix(buffers, tokens, inputs)


@kernel(ReadInputs)
def gated_read(first: int, last: int, _: int, scratch: int, table: int, kind: Any) -> None:
    inputs = unpack(table, ReadInputs)
    buffers, stride, row = buffers_at(scratch, inputs.stride, GATED), inputs.stride, row_of(inputs.stride, ROWS)
    numbers, next_coefficients, count = buffers.numbers, inputs.next_coefficients, inputs.terms
    mixed, norm = buffers.rows + 4 * MIXED * stride, buffers.parameters + 4 * NORM * stride
    _copy_parameters(buffers, inputs)
    for begin in range(first, last, tile_of(stride)):
        tokens = min(tile_of(stride), last - begin)
        _compute(buffers, begin, tokens, inputs, kind)
        for k in range(count):
            a, b = _pair(inputs.coefficients, k, begin, tokens, inputs)
            rho = get(numbers, RHO_VALUE)
            swap = spread(1.0) - rho
            place = coefficient_at(next_coefficients, k, 0, begin, inputs)
            write(place, types.float32, tokens, fma(rho, a, swap * b))
            write(place + 4 * inputs.tokens, types.float32, tokens, fma(rho, b, swap * a))
        for j in range(2):
            place = coefficient_at(next_coefficients, count, j, begin, inputs)
            write(place, types.float32, tokens, get(numbers, VALUES + (2 + j) * LANES))
        write_branch_input(mixed, row, numbers + 4 * FACTOR, norm, begin, tokens, inputs, kind)


@compiled
def _normalize_backward(buffers: Any, begin: int, tokens: int, inputs: Any, kind: Any) -> None:
    """dm of a tile, through the norm if there is one, and parts of dm·h^o of both outputs."""
    rows, numbers, parts, parameters = buffers.rows, buffers.numbers, buffers.parts, buffers.parameters
    stride, row, gradient = inputs.stride, row_of(inputs.stride, ROWS), inputs.h + begin * inputs.width * size_of(kind)
    if inputs.norm != 0:
        mixed, factors, norm = rows + 4 * MIXED * stride, numbers + 4 * FACTOR, parameters + 4 * NORM * stride
        put(numbers, NORM_SHRINK, norm_shrink(mixed, row, factors, norm, parts, begin, tokens, inputs, kind))
    for t in range(tokens):
        factor = number_at(numbers, FACTOR + t)
        shrink = number_at(numbers, NORM_SHRINK + t)
        one = spread(0.0)
        two = spread(0.0)
        for d in range(0, inputs.width, LANES):
            x = read(gradient + (t * inputs.width + d) * size_of(kind), kind, inputs.width - d)
            at = t * row + d
            if inputs.norm != 0:
                x = factor * x
                y = get(rows, at + MIXED * stride)
                put(rows, at + MIXED * stride, x * y)  # dw
                x = x * get(parameters, NORM * stride + d) - shrink * y
            put(rows, at + D_MIXED * stride, x)
            one, two = fma(x, get(rows, at + H * stride), one), fma(x, get(rows, at + (H + 1) * stride), two)
        put(parts, t * LANES, one)
        put(parts, SQUARE + t * LANES, two)


@compiled
def _gates_backward(buffers: Any, begin: int, tokens: int, totals: int, inputs: Any) -> None:
    """Back through the gate values of a tile to Σ_o h^o·W^o and the norm; adds the gradients of scales and biases."""
    numbers, gates, scales = buffers.numbers, integers(inputs.gates), pointer(totals, types.float64)
    norm, d_norm, biases = get(numbers, GATE_NORM), spread(0.0), 3 if inputs.terms > 0 else 2
    for n in range(4):
        x, product = get(numbers, VALUES + n * LANES), get(numbers, PRODUCTS + n * LANES)
        if n < 2:
            dz = sums(buffers.parts, n * SQUARE) * x * (spread(1.0) - x)
        else:
            d_next = coefficient_at(inputs.next_coefficients, inputs.terms, n - 2, begin, inputs)
            dz = read(d_next, types.float32, tokens) * x * (spread(1.0) - x * 0.5)
        scale = number_at(gates[n // 2 * 3 + 1], 0)
        scales[biases + n] += total(dz, tokens)
        scales[n // 2] += total(dz * norm * product, tokens)
        put(numbers, D_PRODUCTS + n * LANES, dz * scale * norm)
        d_norm = fma(dz * scale, product, d_norm)
    put(numbers, SHRINK, norm * norm * norm * d_norm / (2 * inputs.width))


@compiled
def _add_gate_gradients(buffers: Any, tokens: int, inputs: Any) -> None:
    """Add the gradients of W_α, W_β and the norm's weight over a tile."""
    rows, numbers, gradients, stride = buffers.rows, buffers.numbers, buffers.gradients, inputs.stride
    row = row_of(stride, ROWS)
    for d in range(0, stride, LANES):
        for o in range(2):
            at = (GATES + o) * stride + d
            a, b = get(gradients, at), get(gradients, at + 2 * stride)
            c, e = get(gradients, at + 4 * stride), get(gradients, at + 6 * stride)
            for t in range(tokens):
                x, products = get(rows, t * row + (H + o) * stride + d), D_PRODUCTS + t
                a, b = fma(number_at(numbers, products), x, a), fma(number_at(numbers, products + LANES), x, b)
                c = fma(number_at(numbers, products + 2 * LANES), x, c)
                e = fma(number_at(numbers, products + 3 * LANES), x, e)
            put(gradients, at, a)
            put(gradients, at + 2 * stride, b)
            put(gradients, at + 4 * stride, c)
            put(gradients, at + 6 * stride, e)
    if inputs.norm != 0:
        add_rows(gradients + 4 * NORM * stride, rows + 4 * MIXED * stride, row, tokens, inputs)


@compiled
def _merge_backward(buffers: Any, begin: int, tokens: int, inputs: Any, kind: Any) -> None:
    """dh^o, which replaces h^o, and dh̃^o of a tile; parts of dh^o·(P^value − h̃^o)."""
    rows, parameters, numbers, parts = buffers.rows, buffers.parameters, buffers.numbers, buffers.parts
    stride, row, value, size = inputs.stride, row_of(inputs.stride, ROWS), integers(inputs.value), size_of(kind)
    for o in range(2):
        retrieved = stream_at(inputs.retrieved, o, begin, inputs, kind)
        d_retrieved = stream_at(inputs.d_retrieved, o, begin, inputs, kind)
        other, live = stream_at(inputs.d_other, o, begin, inputs, kind), (LIVE + value[o]) * stride
        for t in range(tokens):
            d_rest = spread(0.0)
            gate = number_at(numbers, VALUES + o * LANES + t)
            shrink = number_at(numbers, SHRINK + t)
            own, products = number_at(numbers, OWN + o * LANES + t), D_PRODUCTS + t
            a, b = number_at(numbers, products), number_at(numbers, products + LANES)
            c, e = number_at(numbers, products + 2 * LANES), number_at(numbers, products + 3 * LANES)
            for d in range(0, inputs.width, LANES):
                at, weight = t * row + d, (GATES + o) * stride + d
                place, left = (t * inputs.width + d) * size, inputs.width - d
                x = gate * get(rows, at + D_MIXED * stride) - shrink * get(rows, at + (H + o) * stride)
                x = fma(a, get(parameters, weight), fma(b, get(parameters, weight + 2 * stride), x))
                x = fma(c, get(parameters, weight + 4 * stride), fma(e, get(parameters, weight + 6 * stride), x))
                put(rows, at + (H + o) * stride, x)
                y = x
                if inputs.terms > 0:
                    d_rest = fma(x, get(rows, at + live) - read(retrieved + place, kind, left), d_rest)
                    y = own * x
                if inputs.d_other != 0:
                    y = y + read_ahead(other + place, kind, left)
                write(d_retrieved + place, kind, left, y)
            put(parts, o * SQUARE + t * LANES, d_rest)


@compiled
def _back_to_streams(buffers: Any, begin: int, tokens: int, totals: int, inputs: Any) -> None:
    """The weights of rows in the gradients of the live streams of a tile; adds ρ's gradients of scale and bias."""
    numbers, parts, gates, key = buffers.numbers, buffers.parts, integers(inputs.gates), integers(inputs.key)
    value, scales, width = integers(inputs.value), pointer(totals, types.float64), inputs.width
    rho, norm, product = get(numbers, RHO_VALUE), get(numbers, RHO_NORM), get(numbers, RHO_PRODUCT)
    d_rho = get(numbers, CROSSED)
    for k in range(inputs.terms):
        a, b = _pair(inputs.next_coefficients, k, begin, tokens, inputs)
        c, e = _pair(inputs.coefficients, k, begin, tokens, inputs)
        d_rho = fma(a - b, c - e, d_rho)
    dz, scale = d_rho * rho * (spread(1.0) - rho), number_at(gates[7], 0)
    scales[2] += total(dz * norm * product, tokens)
    scales[7] += total(dz, tokens)
    put(numbers, D_RHO_PRODUCT, dz * scale * norm)
    through_norm = norm * norm * norm * dz * scale * product / (2 * width)
    put(numbers, ITSELF, spread(0.0) - through_norm)
    put(numbers, ITSELF + LANES, spread(0.0) - through_norm)
    for n in range(0, 4 * LANES, LANES):
        put(numbers, RESTS + n, spread(0.0))
        put(numbers, SLOPES + n, spread(0.0))
    for o in range(2):
        own, rest = get(numbers, OWN + o * LANES), get(numbers, REST + o * LANES)
        d_score = sums(parts, o * SQUARE) * own * rest
        write(inputs.d_partition + 4 * (o * inputs.tokens + begin), types.float32, tokens, spread(0.0) - d_score)
        slope = d_score * get(numbers, KEY_NORMS + o * LANES)
        put(numbers, RESTS + (2 * value[o] + o) * LANES, rest)
        put(numbers, SLOPES + (2 * key[o] + o) * LANES, slope)
        x = slope * get(numbers, SCORES + o * LANES) * get(numbers, KEY_NORMS + o * LANES) / width
        itself = ITSELF + key[o] * LANES
        put(numbers, itself, get(numbers, itself) - x)


@compiled
def _pair(coefficients: int, k: int, begin: int, tokens: int, inputs: Any) -> Any:
    """C_k of both streams of a tile, or their gradients."""
    place = coefficient_at(coefficients, k, 0, begin, inputs)
    return read(place, types.float32, tokens), read(place + 4 * inputs.tokens, types.float32, tokens)


@compiled
def _add_query_gradients(buffers: Any, tokens: int, inputs: Any) -> None:
    """Add the gradients of the queries and of W_ρ over a tile."""
    rows, numbers, gradients, stride = buffers.rows, buffers.numbers, buffers.gradients, inputs.stride
    row = row_of(stride, ROWS)
    for d in range(0, stride, LANES):
        query, other_query = get(gradients, QUERY * stride + d), get(gradients, (QUERY + 1) * stride + d)
        rho, other_rho = get(gradients, RHO * stride + d), get(gradients, (RHO + 1) * stride + d)
        for t in range(tokens):
            x, y = get(rows, t * row + LIVE * stride + d), get(rows, t * row + (LIVE + 1) * stride + d)
            slopes, product = SLOPES + t, number_at(numbers, D_RHO_PRODUCT + t)
            query = fma(number_at(numbers, slopes + 2 * LANES), y, fma(number_at(numbers, slopes), x, query))
            other_query = fma(number_at(numbers, slopes + LANES), x, other_query)
            other_query = fma(number_at(numbers, slopes + 3 * LANES), y, other_query)
            rho, other_rho = fma(product, x, rho), fma(product, y, other_rho)
        put(gradients, QUERY * stride + d, query)
        put(gradients, (QUERY + 1) * stride + d, other_query)
        put(gradients, RHO * stride + d, rho)
        put(gradients, (RHO + 1) * stride + d, other_rho)


@compiled
def _stream_gradients(buffers: Any, begin: int, tokens: int, inputs: Any, kind: Any) -> None:
    """dP^j, which replaces P^j: through values, keys, ρ's gate, and M(ρ)."""
    rows, parameters, numbers, stride = buffers.rows, buffers.parameters, buffers.numbers, inputs.stride
    row, size = row_of(stride, ROWS), size_of(kind)
    for j in range(2):
        after = stream_at(inputs.d_after, j, begin, inputs, kind)
        other_after = stream_at(inputs.d_after, 1 - j, begin, inputs, kind)
        carrier, weight = stream_at(inputs.d_carrier, j, begin, inputs, kind), (RHO + j) * stride
        for t in range(tokens):
            rests, slopes = RESTS + 2 * j * LANES + t, SLOPES + 2 * j * LANES + t
            rest, other_rest = number_at(numbers, rests), number_at(numbers, rests + LANES)
            slope, other_slope = number_at(numbers, slopes), number_at(numbers, slopes + LANES)
            itself, product = number_at(numbers, ITSELF + j * LANES + t), number_at(numbers, D_RHO_PRODUCT + t)
            rho = number_at(numbers, RHO_VALUE + t)
            swap = spread(1.0) - rho
            for d in range(0, inputs.width, LANES):
                at, place, left = t * row + d, (t * inputs.width + d) * size, inputs.width - d
                x = fma(itself, get(rows, at + (LIVE + j) * stride), product * get(parameters, weight + d))
                x = fma(rest, get(rows, at + H * stride), fma(other_rest, get(rows, at + (H + 1) * stride), x))
                x = fma(slope, get(parameters, QUERY * stride + d), x)
                x = fma(other_slope, get(parameters, (QUERY + 1) * stride + d), x)
                if inputs.d_after != 0:
                    x = fma(rho, read(after + place, kind, left), fma(swap, read(other_after + place, kind, left), x))
                put(rows, at + (LIVE + j) * stride, x)
                if inputs.d_carrier != 0:
                    write(carrier + place, kind, left, x)


@compiled
def _term_gradients(buffers: Any, begin: int, tokens: int, inputs: Any, kind: Any) -> None:
    """dC_k = M(ρ) d_next[k]; for terms with gradients of their own also + u_k·dP, and du_k = Σ_j C_k^j dP^j."""
    rows, parts, stride, size = buffers.rows, buffers.parts, inputs.stride, size_of(kind)
    row, offset, rho = row_of(stride, ROWS), begin * inputs.width * size_of(kind), get(buffers.numbers, RHO_VALUE)
    swap = spread(1.0) - rho
    for k in range(inputs.terms):
        a, b = _pair(inputs.next_coefficients, k, begin, tokens, inputs)
        x, y = fma(rho, a, swap * b), fma(rho, b, swap * a)
        if k >= inputs.carried:
            update = integers(inputs.updates)[k] + offset
            d_update = integers(inputs.d_updates)[k - inputs.carried] + offset
            coefficients = coefficient_at(inputs.coefficients, k, 0, begin, inputs)
            for t in range(tokens):
                one, two = spread(0.0), spread(0.0)
                c, e = number_at(coefficients, t), number_at(coefficients, inputs.tokens + t)
                for d in range(0, inputs.width, LANES):
                    at, place, left = t * row + LIVE * stride + d, (t * inputs.width + d) * size, inputs.width - d
                    p, q, u = get(rows, at), get(rows, at + stride), read(update + place, kind, left)
                    one, two = fma(u, p, one), fma(u, q, two)
                    write(d_update + place, kind, left, fma(c, p, e * q))
                put(parts, t * LANES, one)
                put(parts, SQUARE + t * LANES, two)
            x, y = x + sums(parts, 0), y + sums(parts, SQUARE)
        place = coefficient_at(inputs.d_coefficients, k, 0, begin, inputs)
        write(place, types.float32, tokens, x)
        write(place + 4 * inputs.tokens, types.float32, tokens, y)


@compiled
def _given(n: int, inputs: Any) -> bool:
    """Whether there is row n of the parameters: queries and W_ρ only with a live state."""
    return inputs.norm != 0 if n == NORM else inputs.terms > 0 or GATES <= n < RHO


@compiled
def _flush(buffers: Any, totals: int, inputs: Any) -> None:
    """Add the gradients of the parameters' rows over some tiles to the first sums, and start again."""
    for n in range(PARAMETERS):
        if _given(n, inputs):
            add_to_sums(totals, buffers.gradients + 4 * n * inputs.stride, inputs.width)
            totals += 8 * inputs.width
    clear_gradients(buffers, GATED, inputs)


@kernel(ReadInputs)
def gated_read_backward(first: int, last: int, totals: int, scratch: int, table: int, kind: Any) -> None:
    inputs = unpack(table, ReadInputs)
    buffers, flushed, tile = buffers_at(scratch, inputs.stride, GATED), first, tile_of(inputs.stride)
    scales = totals  # sums: the parameters' rows; from here on the scales of α, β and ρ, then their biases
    for n in range(PARAMETERS):
        scales += 8 * inputs.width if _given(n, inputs) else 0
    _copy_parameters(buffers, inputs)
    clear_gradients(buffers, GATED, inputs)
    for begin in range(first, last, tile):
        tokens = min(tile, last - begin)
        _compute(buffers, begin, tokens, inputs, kind)
        _normalize_backward(buffers, begin, tokens, inputs, kind)
        _gates_backward(buffers, begin, tokens, scales, inputs)
        _add_gate_gradients(buffers, tokens, inputs)
        _merge_backward(buffers, begin, tokens, inputs, kind)
        if inputs.terms > 0:
            _back_to_streams(buffers, begin, tokens, scales, inputs)
            _add_query_gradients(buffers, tokens, inputs)
            _stream_gradients(buffers, begin, tokens, inputs, kind)
            _term_gradients(buffers, begin, tokens, inputs, kind)
        if begin + tokens - flushed >= FLUSH or begin + tokens == last:
            _flush(buffers, totals, inputs)
            flushed = begin + tokens
