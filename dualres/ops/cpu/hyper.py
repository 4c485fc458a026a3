"""The read of mHC on a CPU: streams, gates, Sinkhorn, branch input and norm of a tile of tokens while it is cached.

The projections of the gates, and their gradients, are products of small matrices, computed in blocks of four by four
vectors; Sinkhorn runs for all tokens of a tile together.
"""
# N tokens  D width  J streams  K updates  G gate values

import itertools
import math
from typing import Any, NamedTuple

from numba import types
from torch import Tensor

from dualres.ops.arguments import HyperReadArguments
from dualres.ops.cpu.compiler import compiled
from dualres.ops.cpu.lanes import (
    LANES,
    add_products,
    exp,
    fma,
    four_numbers_at,
    get,
    get_block,
    get_four,
    inverse_rms,
    number_at,
    put,
    put_block,
    read,
    sigmoid,
    spread,
    sums,
    total,
    where_greater,
    whole_vectors,
    write,
    zero_block,
)
from dualres.ops.cpu.launch import address_of, kernel, unpack
from dualres.ops.cpu.pointers import integers, pointer, size_of
from dualres.ops.cpu.tiles import FLUSH, SQUARE, add_to_sums, coefficient_at, copy_rows

WIDE = 1024  # numbers per token, in all streams: with more, a tile has half as many tokens, to stay cached
SAFE = 50.0  # spread of the logits in a column of H_res, for which plain float32 numbers do


class Buffers(NamedTuple):
    """The addresses of float32 numbers in a part's own memory; in Python, how many there are."""

    weights: int  # (G,row), of all gates
    norm: int  # (stride,), the weight of the branch's norm
    live: int  # (tile,row)
    mixed: int  # (tile,stride), the branch input before its norm
    parts: int  # (16,LANES,LANES), of sums
    factors: int  # (3,LANES): of the gates' norm, of the branch's norm, and one in a gradient
    projected: int  # (G,LANES), later their gradients
    gate_values: int  # (2·J,LANES), H_pre and H_post
    logits: int  # (J·J,LANES), of H_res, later the gradient
    trace: int  # (slots,J·J,LANES)
    exact: int  # (J·J,) in float64
    gradient: int  # (tile,stride), of `mixed`
    d_after: int  # (tile,row)
    d_live: int  # (tile,row)
    d_weights: int  # (G,row)


class Inputs(NamedTuple):
    """Of a read or of its backward pass: addresses, 0 for a tensor that is absent, and numbers."""

    buffers: list[int]  # where they begin
    updates: list[int]
    coefficients: int  # (K,J,N)
    gates: list[int]  # weight, scale and bias of H_pre, H_post and H_res
    norm: int
    terms: int  # K
    streams: int
    tokens: int
    width: int
    steps: int
    slots: int  # half-steps of Sinkhorn that are kept
    tile: int  # tokens
    gate_rows: int  # G, in whole blocks
    length: int  # of the streams of a token, in whole blocks
    stride: int  # from one stream of a token to the next
    row: int  # from one token to the next
    eps: float
    norm_eps: float
    h: int  # backward, its gradient
    next_coefficients: int  # backward, their gradient
    d_after: int  # (J,N,D), the gradient of what the carrier after the read stands for
    carried: int
    d_updates: list[int]
    d_coefficients: int
    d_carrier: int


def _inputs(arguments: HyperReadArguments, h: Tensor, next_coefficients: Tensor, *backward: Any) -> tuple[Inputs, int]:
    """The inputs, and the size of a part's own memory."""
    terms, streams, *_ = arguments.coefficients.shape
    values, block = streams * (streams + 2), 4 * LANES
    stride, gate_rows = whole_vectors(h.shape[-1]), -(-values // 4) * 4
    length = -(-streams * stride // block) * block
    row = length + LANES  # no power of two: otherwise the tokens of a tile would evict each other from the cache
    tile, slots = LANES if length <= WIDE else LANES // 2, 2 * arguments.steps if backward else 2
    sizes = Buffers(
        weights=gate_rows * row,
        norm=stride,
        live=tile * row + 4 * stride,  # the last block of four streams reaches beyond them
        mixed=tile * stride,
        parts=16 * SQUARE,
        factors=3 * LANES,
        projected=gate_rows * LANES,
        gate_values=2 * streams * LANES,
        logits=streams * streams * LANES,
        trace=slots * streams * streams * LANES,
        exact=2 * whole_vectors(streams * streams),
        gradient=tile * stride if backward else 0,
        d_after=tile * row + 4 * stride if backward else 0,
        d_live=tile * row if backward else 0,
        d_weights=gate_rows * row if backward else 0,
    )
    *begins, size = itertools.accumulate(sizes, initial=0)
    inputs = Inputs(
        begins,
        [update.data_ptr() for update in arguments.updates],
        arguments.coefficients.data_ptr(),
        [parameter.data_ptr() for parameter in arguments.gates],
        address_of(arguments.norm),
        terms,
        streams,
        math.prod(arguments.coefficients.shape[2:]),
        h.shape[-1],
        arguments.steps,
        slots,
        tile,
        gate_rows,
        length,
        stride,
        row,
        arguments.eps,
        arguments.norm_eps,
        h.data_ptr(),
        next_coefficients.data_ptr(),
        *(backward or (0, 0, [], 0, 0)),
    )
    return inputs, size


@compiled
def _buffers(memory: int, begins: int) -> Any:
    n = integers(begins)
    return Buffers(
        memory + 4 * n[0],
        memory + 4 * n[1],
        memory + 4 * n[2],
        memory + 4 * n[3],
        memory + 4 * n[4],
        memory + 4 * n[5],
        memory + 4 * n[6],
        memory + 4 * n[7],
        memory + 4 * n[8],
        memory + 4 * n[9],
        memory + 4 * n[10],
        memory + 4 * n[11],
        memory + 4 * n[12],
        memory + 4 * n[13],
        memory + 4 * n[14],
    )


def hyper_read(arguments: HyperReadArguments, results: list[Tensor]) -> None:
    h, next_coefficients = results
    inputs, scratch = _inputs(arguments, h, next_coefficients)
    _forward(inputs, inputs.tokens, h.dtype, scratch)


@compiled
def _coefficient(coefficients: int, k: int, j: int, begin: int, tokens: int, inputs: Any) -> Any:
    """C_k^j of a tile."""
    return read(coefficient_at(coefficients, k, j, begin, inputs), types.float32, tokens)


@compiled
def _copy_weights(buffers: Any, inputs: Any) -> None:
    """The weights of all gates in one matrix, with zeros where rows of streams or blocks of gates are filled up."""
    gates, weights = integers(inputs.gates), buffers.weights
    for n in range(0, inputs.gate_rows * inputs.row, LANES):
        put(weights, n, spread(0.0))
    g = 0
    for gate in range(3):
        size = inputs.streams if gate < 2 else inputs.streams * inputs.streams
        for value in range(size):
            of_value = gates[3 * gate] + 4 * value * inputs.streams * inputs.width
            copy_rows(weights, g * inputs.row, of_value, inputs.streams, inputs.width, inputs.stride, types.float32)
            g += 1
    if inputs.norm != 0:
        copy_rows(buffers.norm, 0, inputs.norm, 1, inputs.width, inputs.stride, types.float32)


@compiled
def _live_streams(buffers: Any, begin: int, tokens: int, inputs: Any, kind: Any) -> None:
    """X^j = Σ_k C_k^j u_k of a tile, and the inverse norm of [X⁰; X¹; …] as its first factor."""
    updates, live, parts = integers(inputs.updates), buffers.live, buffers.parts
    size, streams = size_of(kind), inputs.streams
    for t in range(tokens):
        square = square_too = spread(0.0)
        for j in range(0, streams, 2):
            other = min(j + 1, streams - 1)
            for d in range(0, inputs.width, LANES):
                one = two = spread(0.0)
                at = ((begin + t) * inputs.width + d) * size
                for k in range(inputs.terms):
                    x = read(updates[k] + at, kind, inputs.width - d)
                    one = fma(number_at(coefficient_at(inputs.coefficients, k, j, begin, inputs), t), x, one)
                    two = fma(number_at(coefficient_at(inputs.coefficients, k, other, begin, inputs), t), x, two)
                put(live, t * inputs.row + j * inputs.stride + d, one)
                square = fma(one, one, square)
                if other != j:
                    put(live, t * inputs.row + other * inputs.stride + d, two)
                    square_too = fma(two, two, square_too)
        for d in range(streams * inputs.stride, inputs.length, LANES):
            put(live, t * inputs.row + d, spread(0.0))
        put(parts, t * LANES, square + square_too)
    put(buffers.factors, 0, inverse_rms(sums(parts, 0), streams * inputs.width, inputs.eps))


@compiled
def _project(buffers: Any, tokens: int, inputs: Any) -> None:
    """e_g = Σ_j x^j · W_g^j of a tile."""
    weights, live, parts = buffers.weights, buffers.live, buffers.parts
    for g in range(0, inputs.gate_rows, 4):
        for t in range(0, tokens, 4):
            block = zero_block(0)
            for d in range(0, inputs.length, LANES):
                rows = get_four(weights, g * inputs.row + d, inputs.row)
                block = add_products(block, rows, get_four(live, t * inputs.row + d, inputs.row))
            put_block(parts, t * LANES, SQUARE, LANES, block)
        for n in range(4):
            put(buffers.projected, (g + n) * LANES, sums(parts, n * SQUARE))


@compiled
def _gate(buffers: Any, gate: int, value: int, inputs: Any) -> Any:
    """scale · norm · e + bias of one value of a gate."""
    gates, before = integers(inputs.gates), gate * inputs.streams
    e, norm = get(buffers.projected, (before + value) * LANES), get(buffers.factors, 0)
    return fma(number_at(gates[3 * gate + 1], 0) * norm, e, number_at(gates[3 * gate + 2], value))


@compiled
def _gates(buffers: Any, tokens: int, inputs: Any) -> int:
    """H_pre, H_post and H_res of a tile. -> the place of H_res"""
    streams = inputs.streams
    for j in range(streams):
        put(buffers.gate_values, j * LANES, sigmoid(_gate(buffers, 0, j, inputs)))
        put(buffers.gate_values, (streams + j) * LANES, sigmoid(_gate(buffers, 1, j, inputs)) * 2)
    for g in range(streams * streams):
        put(buffers.logits, g * LANES, _gate(buffers, 2, g, inputs))
    _sinkhorn(buffers, tokens, inputs)
    return buffers.trace + 4 * ((2 * inputs.steps - 1) % inputs.slots) * streams * streams * LANES


@compiled
def _sinkhorn(buffers: Any, tokens: int, inputs: Any) -> None:
    """The matrix after every half-step: columns, rows, columns, …; the last `slots` of them are kept."""
    size, logits, trace = inputs.streams, buffers.logits, buffers.trace
    matrix = trace + 4 * (inputs.slots - 1) * size * size * LANES
    extreme = spread(0.0)
    for j in range(size):
        highest = lowest = get(logits, j * LANES)
        for i in range(1, size):
            x = get(logits, (i * size + j) * LANES)
            highest, lowest = where_greater(x, highest, x, highest), where_greater(lowest, x, x, lowest)
        extreme = where_greater(highest - lowest, spread(SAFE), spread(1.0), extreme)
        for i in range(size):
            put(matrix, (i * size + j) * LANES, exp(get(logits, (i * size + j) * LANES) - highest))
    for step in range(2 * inputs.steps):
        after = trace + 4 * (step % inputs.slots) * size * size * LANES
        along, across = (size * LANES, LANES) if step % 2 == 0 else (LANES, size * LANES)
        for a in range(size):
            mass = spread(0.0)
            for b in range(size):
                mass = mass + get(matrix, a * across + b * along)
            share = spread(1.0) / mass
            for b in range(size):
                put(after, a * across + b * along, get(matrix, a * across + b * along) * share)
        matrix = after
    for a in range(size):  # the last rows sum to one but for rounding: equal streams stay equal only if they do
        rest = spread(1.0)
        for b in range(size):
            rest = rest - get(matrix, (a * size + b) * LANES)
        put(matrix, (a * size + a) * LANES, get(matrix, (a * size + a) * LANES) + rest)
    if total(extreme, tokens) > 0:
        put(buffers.parts, 0, extreme)
        extremes = pointer(buffers.parts, types.float32)
        for t in range(tokens):
            if extremes[t] > 0:
                _exact_sinkhorn(buffers, t, inputs)


@compiled
def _exact_sinkhorn(buffers: Any, t: int, inputs: Any) -> None:
    """`_sinkhorn` of one token in float64: in linear space, or in log space if a row or column would underflow."""
    size, logits = inputs.streams, pointer(buffers.logits + 4 * t, types.float32)
    matrix = pointer(buffers.exact, types.float64)
    for in_log_space in (False, True):
        for j in range(size):
            highest = logits[j * LANES]
            for i in range(size):
                highest = max(highest, logits[(i * size + j) * LANES])
            for i in range(size):
                x = types.float64(logits[(i * size + j) * LANES]) - highest
                matrix[i * size + j] = x if in_log_space else math.exp(x)
        vanished = False
        for step in range(2 * inputs.steps):
            along, across = (size, 1) if step % 2 == 0 else (1, size)
            for a in range(size):
                mass = 0.0
                if in_log_space:
                    highest_log = matrix[a * across]
                    for b in range(size):
                        highest_log = max(highest_log, matrix[a * across + b * along])
                    for b in range(size):
                        mass += math.exp(matrix[a * across + b * along] - highest_log)
                    for b in range(size):
                        matrix[a * across + b * along] -= highest_log + math.log(mass)
                else:
                    for b in range(size):
                        mass += matrix[a * across + b * along]
                    vanished = vanished or mass < 1e-200
                    for b in range(size):
                        matrix[a * across + b * along] /= mass
            kept = pointer(buffers.trace + 4 * ((step % inputs.slots) * size * size * LANES + t), types.float32)
            for g in range(size * size):
                kept[g * LANES] = math.exp(matrix[g]) if in_log_space else matrix[g]
        if not vanished:
            return


@compiled
def _mix(buffers: Any, tokens: int, inputs: Any) -> None:
    """Σ_j H_pre^j X^j of a tile; if there is a norm, the inverse norm as its second factor."""
    live, mixed = buffers.live, buffers.mixed
    parts, gate_values = buffers.parts, buffers.gate_values
    for t in range(tokens):
        square = spread(0.0)
        for d in range(0, inputs.stride, LANES):
            x = spread(0.0)
            for j in range(inputs.streams):
                x = fma(number_at(gate_values, j * LANES + t), get(live, t * inputs.row + j * inputs.stride + d), x)
            put(mixed, t * inputs.stride + d, x)
            square = fma(x, x, square)
        put(parts, t * LANES, square)
    put(buffers.factors, LANES, inverse_rms(sums(parts, 0), inputs.width, inputs.norm_eps))


@kernel(Inputs)
def _forward(first: int, last: int, _: int, scratch: int, table: int, kind: Any) -> None:
    inputs = unpack(table, Inputs)
    buffers = _buffers(scratch, inputs.buffers)
    streams, count, mixed = inputs.streams, inputs.terms, buffers.mixed
    _copy_weights(buffers, inputs)
    for begin in range(first, last, inputs.tile):
        tokens = min(inputs.tile, last - begin)
        _live_streams(buffers, begin, tokens, inputs, kind)
        _project(buffers, tokens, inputs)
        matrix = _gates(buffers, tokens, inputs)
        _mix(buffers, tokens, inputs)
        for k in range(count):
            for i in range(streams):
                x = spread(0.0)
                for j in range(streams):
                    coefficient = _coefficient(inputs.coefficients, k, j, begin, tokens, inputs)
                    x = fma(get(matrix, (i * streams + j) * LANES), coefficient, x)
                write(coefficient_at(inputs.next_coefficients, k, i, begin, inputs), types.float32, tokens, x)
        for j in range(streams):
            x = get(buffers.gate_values, (streams + j) * LANES)
            write(coefficient_at(inputs.next_coefficients, count, j, begin, inputs), types.float32, tokens, x)
        for t in range(tokens):
            factor = number_at(buffers.factors, LANES + t)
            for d in range(0, inputs.width, LANES):
                x = get(mixed, t * inputs.stride + d)
                if inputs.norm != 0:
                    x = x * factor * get(buffers.norm, d)
                at = (begin + t) * inputs.width + d
                write(inputs.h + at * size_of(kind), kind, inputs.width - d, x)


def hyper_read_backward(
    d_h: Tensor, d_next: Tensor, d_live: Tensor | None, arguments: HyperReadArguments, gradients: HyperReadArguments
) -> None:
    inputs, scratch = _inputs(
        arguments,
        d_h,
        d_next,
        address_of(d_live),
        arguments.carried,
        [update.data_ptr() for update in gradients.updates],
        gradients.coefficients.data_ptr(),
        address_of(gradients.carrier),
    )
    _backward(inputs, inputs.tokens, d_h.dtype, scratch, [*gradients.gates, gradients.norm])


@compiled
def _normalize_backward(buffers: Any, d_norm: int, tokens: int, inputs: Any) -> None:
    """Turn the gradient of the normalized branch input into that of the branch input; add the weight's to sums."""
    gradient, mixed, norm_row = buffers.gradient, buffers.mixed, buffers.norm
    parts, factors, stride = buffers.parts, buffers.factors, inputs.stride
    for t in range(tokens):
        product = spread(0.0)
        for d in range(0, stride, LANES):
            x = get(gradient, t * stride + d) * get(mixed, t * stride + d)
            product = fma(x, get(norm_row, d), product)
        put(parts, t * LANES, product)
    factor = get(factors, LANES)
    put(factors, 2 * LANES, factor * factor * factor * sums(parts, 0) / inputs.width)
    for d in range(0, stride, LANES):
        weight, d_weight = get(norm_row, d), spread(0.0)
        for t in range(tokens):
            x, y = get(gradient, t * stride + d), get(mixed, t * stride + d)
            scaled = number_at(factors, LANES + t) * x
            d_weight = fma(scaled, y, d_weight)
            put(gradient, t * stride + d, scaled * weight - number_at(factors, 2 * LANES + t) * y)
        put(parts, d % SQUARE, d_weight)
        add_to_sums(d_norm + 8 * d, parts + 4 * (d % SQUARE), min(LANES, inputs.width - d))


@compiled
def _dots_with_streams(buffers: Any, rows: int, stride: int, streams: int, j: int, tokens: int, inputs: Any) -> None:
    """The dot products of a tile's rows with two streams, from j on, each in LANES parts."""
    parts, other = buffers.parts, min(j + 1, inputs.streams - 1)
    for t in range(tokens):
        one = two = spread(0.0)
        first, second = t * inputs.row + j * inputs.stride, t * inputs.row + other * inputs.stride
        for d in range(0, inputs.stride, LANES):
            x = get(rows, t * stride + d)
            one, two = fma(x, get(streams, first + d), one), fma(x, get(streams, second + d), two)
        put(parts, t * LANES, one)
        put(parts, SQUARE + t * LANES, two)


@compiled
def _matrix_gradient(buffers: Any, begin: int, tokens: int, inputs: Any) -> None:
    """dH_res[i, j] = Σ_k d_next[k, i] C_k^j + d_after^i · X^j, in place of the logits."""
    streams, stride, parts = inputs.streams, inputs.stride, buffers.parts
    after, live = buffers.d_after, buffers.live
    for row in range(0, streams, 4):
        for column in range(0, streams, 4):
            if inputs.d_after != 0:
                for t in range(tokens):
                    block = zero_block(0)
                    for d in range(0, stride, LANES):
                        rows = get_four(after, t * inputs.row + row * stride + d, stride)
                        columns = get_four(live, t * inputs.row + column * stride + d, stride)
                        block = add_products(block, rows, columns)
                    put_block(parts, t * LANES, 4 * SQUARE, SQUARE, block)
            for i in range(row, min(row + 4, streams)):
                for j in range(column, min(column + 4, streams)):
                    x = spread(0.0)
                    if inputs.d_after != 0:
                        x = sums(parts, (4 * (i - row) + j - column) * SQUARE)
                    for k in range(inputs.terms):
                        d_next = _coefficient(inputs.next_coefficients, k, i, begin, tokens, inputs)
                        x = fma(d_next, _coefficient(inputs.coefficients, k, j, begin, tokens, inputs), x)
                    put(buffers.logits, (i * streams + j) * LANES, x)


@compiled
def _sinkhorn_backward(buffers: Any, inputs: Any) -> None:
    """Turn the gradient of the last matrix into that of the logits: a half-step L' = L − lse(L) has
    dL = dL' − exp(L') Σ dL', summed over what it normalized."""
    size, d_matrix = inputs.streams, buffers.logits
    for step in range(2 * inputs.steps - 1, -1, -1):
        matrix = buffers.trace + 4 * step * size * size * LANES
        along, across = (size * LANES, LANES) if step % 2 == 0 else (LANES, size * LANES)
        if step == 2 * inputs.steps - 1:
            for n in range(0, size * size * LANES, LANES):
                put(d_matrix, n, get(d_matrix, n) * get(matrix, n))
        for a in range(size):
            change = spread(0.0)
            for b in range(size):
                change = change - get(d_matrix, a * across + b * along)
            for b in range(size):
                at = a * across + b * along
                put(d_matrix, at, fma(change, get(matrix, at), get(d_matrix, at)))


@compiled
def _gates_backward(buffers: Any, totals: int, begin: int, tokens: int, inputs: Any) -> None:
    """Turn the projections into their gradients; add those of scales and biases to sums.

    The third factor becomes that of X in its own gradient, through its norm.
    """
    streams, gates = inputs.streams, integers(inputs.gates)
    parts, gate_values, factors = buffers.parts, buffers.gate_values, buffers.factors
    norm, d_norm, g = get(factors, 0), spread(0.0), 0
    for gate in range(3):
        size = streams if gate < 2 else streams * streams
        scale, d_scale = number_at(gates[3 * gate + 1], 0), spread(0.0)
        totals += 8 * size * streams * inputs.width  # beyond the weight: scale and bias
        found = pointer(totals, types.float64)
        for n in range(size):
            if gate == 0:
                if n % 2 == 0:
                    live, gradient = buffers.live, buffers.gradient
                    _dots_with_streams(buffers, gradient, inputs.stride, live, n, tokens, inputs)
                value = get(gate_values, n * LANES)
                dz = sums(parts, (n % 2) * SQUARE) * value * (spread(1.0) - value)
            elif gate == 1:
                value = get(gate_values, (streams + n) * LANES)
                d_value = _coefficient(inputs.next_coefficients, inputs.terms, n, begin, tokens, inputs)
                dz = d_value * value * (spread(1.0) - value * 0.5)
            else:
                dz = get(buffers.logits, n * LANES)
            e = get(buffers.projected, g * LANES)
            found[1 + n] += total(dz, tokens)
            d_scale = fma(dz, e, d_scale)
            put(buffers.projected, g * LANES, dz * scale * norm)
            g += 1
        found[0] += total(d_scale * norm, tokens)
        d_norm = fma(d_scale, scale, d_norm)
        totals += 8 * (1 + size)
    put(factors, 2 * LANES, spread(0.0) - d_norm * norm * norm * norm / (streams * inputs.width))


@compiled
def _stream_gradients(buffers: Any, begin: int, tokens: int, matrix: int, inputs: Any, kind: Any) -> None:
    """dX^j = Σ_g de_g W_g^j + factor · X^j + H_pre^j dh + Σ_i H_res[i, j] d_after^i"""
    weights, live, d_live = buffers.weights, buffers.live, buffers.d_live
    after, gradient, factors = buffers.d_after, buffers.gradient, buffers.factors
    streams, stride = inputs.streams, inputs.stride
    for d in range(0, inputs.length, 4 * LANES):
        for t in range(0, tokens, 4):
            block = zero_block(0)
            for g in range(streams * (streams + 2)):
                numbers = four_numbers_at(buffers.projected, g * LANES + t, 1)
                block = add_products(block, numbers, get_four(weights, g * inputs.row + d, LANES))
            put_block(d_live, t * inputs.row + d, inputs.row, LANES, block)
    for t in range(tokens):
        factor = number_at(factors, 2 * LANES + t)
        for j in range(streams):
            gate = number_at(buffers.gate_values, j * LANES + t)
            for d in range(0, inputs.width, LANES):
                at = t * inputs.row + j * stride + d
                x = fma(factor, get(live, at), get(d_live, at))
                x = fma(gate, get(gradient, t * stride + d), x)
                if inputs.d_after != 0:
                    for i in range(streams):
                        share = number_at(matrix, (i * streams + j) * LANES + t)
                        x = fma(share, get(after, t * inputs.row + i * stride + d), x)
                put(d_live, at, x)
                if inputs.d_carrier != 0:
                    place = (j * inputs.tokens + begin + t) * inputs.width + d
                    write(inputs.d_carrier + place * size_of(kind), kind, inputs.width - d, x)


@compiled
def _add_weight_gradients(buffers: Any, tokens: int, inputs: Any) -> None:
    """dW_g^j += de_g X^j over a tile."""
    projected, live, d_weights = buffers.projected, buffers.live, buffers.d_weights
    for d in range(0, inputs.length, 4 * LANES):
        for g in range(0, inputs.gate_rows, 4):
            block = get_block(d_weights, g * inputs.row + d, inputs.row, LANES)
            for t in range(tokens):
                numbers = four_numbers_at(projected, g * LANES + t, LANES)
                block = add_products(block, numbers, get_four(live, t * inputs.row + d, LANES))
            put_block(d_weights, g * inputs.row + d, inputs.row, LANES, block)


@compiled
def _flush(buffers: Any, totals: int, inputs: Any) -> None:
    """Add the gradients of the weights over some tiles to sums, and start again."""
    streams, d_weights, g = inputs.streams, buffers.d_weights, 0
    for gate in range(3):
        size = streams if gate < 2 else streams * streams
        for _ in range(size):
            for j in range(streams):
                add_to_sums(totals, d_weights + 4 * (g * inputs.row + j * inputs.stride), inputs.width)
                totals += 8 * inputs.width
            g += 1
        totals += 8 * (1 + size)
    for n in range(0, inputs.gate_rows * inputs.row, LANES):
        put(d_weights, n, spread(0.0))


@compiled
def _term_gradients(buffers: Any, begin: int, tokens: int, matrix: int, inputs: Any, kind: Any) -> None:
    """dC_k = H_resᵀ d_next[k]; for terms with gradients of their own also + u_k · dX, and du_k = Σ_j C_k^j dX^j."""
    streams, stride, count = inputs.streams, inputs.stride, inputs.terms
    updates, d_updates = integers(inputs.updates), integers(inputs.d_updates)
    d_live, rows, parts = buffers.d_live, buffers.mixed, buffers.parts
    offset = begin * inputs.width * size_of(kind)
    for k in range(count):
        fresh = k >= inputs.carried
        if fresh:
            copy_rows(rows, 0, updates[k] + offset, tokens, inputs.width, stride, kind)
            for t in range(tokens):
                for d in range(0, inputs.width, LANES):
                    x = spread(0.0)
                    for j in range(streams):
                        c = number_at(coefficient_at(inputs.coefficients, k, j, begin, inputs), t)
                        x = fma(c, get(d_live, t * inputs.row + j * stride + d), x)
                    place = d_updates[k - inputs.carried] + offset + (t * inputs.width + d) * size_of(kind)
                    write(place, kind, inputs.width - d, x)
        for j in range(streams):
            x = spread(0.0)
            if fresh:
                if j % 2 == 0:
                    _dots_with_streams(buffers, rows, stride, d_live, j, tokens, inputs)
                x = sums(parts, (j % 2) * SQUARE)
            for i in range(streams):
                d_next = _coefficient(inputs.next_coefficients, k, i, begin, tokens, inputs)
                x = fma(get(matrix, (i * streams + j) * LANES), d_next, x)
            write(coefficient_at(inputs.d_coefficients, k, j, begin, inputs), types.float32, tokens, x)


@kernel(Inputs)
def _backward(first: int, last: int, totals: int, scratch: int, table: int, kind: Any) -> None:
    inputs = unpack(table, Inputs)
    buffers = _buffers(scratch, inputs.buffers)
    streams, size, flushed = inputs.streams, size_of(kind), first
    sizes = streams * (streams + 2)
    d_norm = totals + 8 * (sizes * streams * inputs.width + 3 + sizes)
    _copy_weights(buffers, inputs)
    for n in range(0, inputs.gate_rows * inputs.row, LANES):
        put(buffers.d_weights, n, spread(0.0))
    for begin in range(first, last, inputs.tile):
        tokens, offset = min(inputs.tile, last - begin), begin * inputs.width * size
        _live_streams(buffers, begin, tokens, inputs, kind)
        _project(buffers, tokens, inputs)
        matrix = _gates(buffers, tokens, inputs)
        copy_rows(buffers.gradient, 0, inputs.h + offset, tokens, inputs.width, inputs.stride, kind)
        if inputs.norm != 0:
            _mix(buffers, tokens, inputs)
            _normalize_backward(buffers, d_norm, tokens, inputs)
        if inputs.d_after != 0:
            for t in range(tokens):
                for j in range(streams):
                    row = inputs.d_after + ((j * inputs.tokens + begin + t) * inputs.width) * size
                    into = t * inputs.row + j * inputs.stride
                    copy_rows(buffers.d_after, into, row, 1, inputs.width, inputs.stride, kind)
        _matrix_gradient(buffers, begin, tokens, inputs)
        _sinkhorn_backward(buffers, inputs)
        _gates_backward(buffers, totals, begin, tokens, inputs)
        _stream_gradients(buffers, begin, tokens, matrix, inputs, kind)
        _add_weight_gradients(buffers, tokens, inputs)
        _term_gradients(buffers, begin, tokens, matrix, inputs, kind)
        if begin + tokens - flushed >= FLUSH or begin + tokens == last:
            _flush(buffers, totals, inputs)
            flushed = begin + tokens
