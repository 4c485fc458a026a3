"""Reads (phase 2) on a CPU.

A read computes a token's live streams, merge, gates, branch input and norm while its rows are in the cache, in a few
loops over the width. Numbers are float32; gradients of parameters are summed over CHUNK tokens in float32, and these
sums in float64.
"""
# N tokens  D width  J stored streams  O output streams  K updates

import math
from typing import Any, NamedTuple

import numpy as np
from numba import types
from torch import Tensor

from dualres.ops.arguments import ReadArguments
from dualres.ops.cpu.compiler import compiled
from dualres.ops.cpu.launch import address_of, kernel, unpack
from dualres.ops.cpu.live import sum_updates, update_backward
from dualres.ops.cpu.loops import LANES, loop
from dualres.ops.cpu.rows import floats, integers, pointer, row_at

CHUNK = 64
ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)


class Inputs(NamedTuple):
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


def _inputs(arguments: ReadArguments, h: Tensor, next_coefficients: Tensor, *backward: Any) -> Inputs:
    retrieved, coefficients = arguments.retrieved, arguments.coefficients
    gates = [parameter.data_ptr() for parameter in arguments.gates]
    return Inputs(
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
        retrieved.shape[-1],
        arguments.eps,
        arguments.norm_eps,
        h.data_ptr(),
        next_coefficients.data_ptr(),
        *(backward or (0, 0, 0, 0, 0, [], 0, 0)),
    )


def read(arguments: ReadArguments, results: list[Tensor]) -> None:
    inputs = _inputs(arguments, *results)
    run = _gated_read if arguments.gates else _read
    run(inputs, inputs.tokens, arguments.retrieved.dtype, ROWS * _row_size(inputs.width))


def read_backward(
    d_h: Tensor,
    d_next: Tensor,
    d_live: Tensor | None,
    d_retrieved: Tensor | None,
    arguments: ReadArguments,
    gradients: ReadArguments,
) -> None:
    inputs = _inputs(
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
    run = _gated_read_backward if arguments.gates else _read_backward
    scratch = (BACKWARD_ROWS + PARAMETER_ROWS) * _row_size(inputs.width)
    run(inputs, inputs.tokens, arguments.retrieved.dtype, scratch, sums)


# Rows of scratch: two live streams, two output streams, the branch input before its norm; backward, each then holds its
# gradient, and there is a row of zeros, and after it the gradients of the parameters' rows in the order of the sums.
ROWS, BACKWARD_ROWS, PARAMETER_ROWS = 5, 6, 13


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
def _sigmoid(x: Any) -> Any:
    return ONE / (ONE + math.exp(-x))


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


# Without gates


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


@kernel(Inputs)
def _read(first: int, last: int, sums: int, scratch: int, table: int, kind: Any) -> None:
    inputs = unpack(table, Inputs)
    width, norm, norm_eps = inputs.width, floats(inputs.norm), inputs.norm_eps
    live, mixed = _two_rows(scratch, 0, width), _row(scratch, 2, width)
    _clear(scratch, 2, width)  # which they remain without updates
    key, value = _pick(live, integers(inputs.key)[0]), _pick(live, integers(inputs.value)[0])
    for t in range(first, last):
        row, h = row_at(inputs.retrieved, t, width, kind), row_at(inputs.h, t, width, kind)
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


@kernel(Inputs)
def _read_backward(first: int, last: int, sums: int, scratch: int, table: int, kind: Any) -> None:
    inputs = unpack(table, Inputs)
    width, tokens, norm, query = inputs.width, inputs.tokens, floats(inputs.norm), floats(inputs.query)
    live, d_h, zero = _two_rows(scratch, 0, width), _row(scratch, 2, width), pointer(_place(scratch, 5, width), kind)
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
                carrier = (row_at(inputs.d_carrier, place, width, kind),)
                stream_backward(width, _pick(live, j), carrier, stream, d_h, query, d_query, after)
            else:
                stream_backward(width, _pick(live, j), (), stream, d_h, query, d_query, after)
        for k in range(inputs.carried, inputs.terms):
            d_update = row_at(integers(inputs.d_updates)[k - inputs.carried], t, width, kind)
            at = k * inputs.streams * tokens + t
            if inputs.streams == 1:
                update_backward(width, d_update, (), (), (coefficients[at],), (live[0],))
            else:
                update_backward(width, d_update, (), (), (coefficients[at], coefficients[at + tokens]), live)
    _flush(sums, scratch, parameters, width)


# With gates


class Parameters(NamedTuple):
    """Rows of parameters, or of their gradients."""

    query: Any
    weights: Any  # of α⁰, α¹, β⁰ and β¹, each in both streams
    rho: Any
    norm: Any


class Token(NamedTuple):
    """Rows of a token."""

    retrieved: Any
    live: Any
    keys: Any  # P^key of both outputs
    values: Any  # P^value of both outputs
    h: Any
    mixed: Any


class Weights(NamedTuple):
    """The numbers of a token that depend on its live streams."""

    own: Any  # λ
    rest: Any  # 1 − λ
    scores: Any  # q·Norm(P^key)
    norms: Any  # the inverse norms of P^key
    rho: Any
    rho_norm: Any  # the inverse norm of [P⁰; P¹]
    rho_product: Any  # Σ_j P^j·W_ρ^j
    crossed: Any  # Σ_d (g⁰ − g¹)(P⁰ − P¹) with the gradient g of M(ρ) P


ALONE = Weights((ONE, ONE), (ZERO, ZERO), (ZERO, ZERO), (ZERO, ZERO), ONE, ZERO, ZERO, ZERO)  # without a live state


@compiled
def _rows_of(address: int, n: int, width: int) -> Any:
    """Rows n and n + 1 of a parameter."""
    return row_at(address, n, width, types.float32), row_at(address, n + 1, width, types.float32)


@compiled
def _parameters(inputs: Any) -> Any:
    gates, width = integers(inputs.gates), inputs.width
    alpha, beta, rho = gates[0], gates[3], gates[6]
    weights = _rows_of(alpha, 0, width), _rows_of(alpha, 2, width), _rows_of(beta, 0, width), _rows_of(beta, 2, width)
    return Parameters(_rows_of(inputs.query, 0, width), weights, _rows_of(rho, 0, width), floats(inputs.norm))


@compiled
def _streams_at(address: int, t: int, inputs: Any, kind: Any) -> Any:
    """Row t of both streams at an address."""
    return row_at(address, t, inputs.width, kind), row_at(address, inputs.tokens + t, inputs.width, kind)


@compiled
def _token(t: int, scratch: int, inputs: Any, kind: Any) -> Any:
    live, h = _two_rows(scratch, 0, inputs.width), _two_rows(scratch, 2, inputs.width)
    key, value, retrieved = integers(inputs.key), integers(inputs.value), _streams_at(inputs.retrieved, t, inputs, kind)
    keys, values = (_pick(live, key[0]), _pick(live, key[1])), (_pick(live, value[0]), _pick(live, value[1]))
    return Token(retrieved, live, keys, values, h, _row(scratch, 4, inputs.width))


@loop
def stream_products(token: Any, own: Any, after: Any) -> Any:
    """|P⁰|², |P¹|², q·P^key of both outputs, Σ_j P^j·W_ρ^j and, backward, Σ_d (g⁰ − g¹)(P⁰ − P¹)"""
    a, b = token.live
    keyed = [query * key for query, key in zip(own.query, token.keys, strict=True)]
    crossed = [(after[0] - after[1]) * (a - b)] if after else []
    return a * a, b * b, *keyed, a * own.rho[0] + b * own.rho[1], *crossed


@compiled
def _weights(t: int, sums: Any, inputs: Any) -> Any:
    width, eps, partition, key = inputs.width, inputs.eps, floats(inputs.partition), integers(inputs.key)
    sizes, (rho_scale, rho_bias) = (sums[0], sums[1]), (integers(inputs.gates)[7], integers(inputs.gates)[8])
    norms = _inverse_norm(_pick(sizes, key[0]), width, eps), _inverse_norm(_pick(sizes, key[1]), width, eps)
    scores = sums[2] * norms[0], sums[3] * norms[1]
    own, rest = _sigmoids(partition[t] - scores[0])
    other_own, other_rest = _sigmoids(partition[inputs.tokens + t] - scores[1])
    rho_norm = _inverse_norm(sizes[0] + sizes[1], 2 * width, eps)
    rho = _sigmoid(floats(rho_scale)[0] * rho_norm * sums[4] + floats(rho_bias)[0])
    return Weights((own, other_own), (rest, other_rest), scores, norms, rho, rho_norm, sums[4], sums[-1])


@loop
def merge_streams(token: Any, found: Any, own: Any) -> Any:
    """h^o = λ h̃^o + (1 − λ) P^value -> Σ_o |h^o|², and Σ_o h^o·W^o for each of the gates' weights"""
    merges = map(Merge, token.retrieved, found.own, token.values, found.rest)
    a, b = (row.set(_merged(merge)) for row, merge in zip(token.h, merges, strict=True))
    return a * a + b * b, *(a * weight[0] + b * weight[1] for weight in own.weights)


@compiled
def _gates(sums: Any, inputs: Any) -> Any:
    """α, β, and the inverse norm of [h⁰; h¹]"""
    size, a, b, c, e = sums
    gates, norm = integers(inputs.gates), _inverse_norm(size, 2 * inputs.width, inputs.eps)
    factor, bias = floats(gates[1])[0] * norm, floats(gates[2])
    alpha = _sigmoid(factor * a + bias[0]), _sigmoid(factor * b + bias[1])
    factor, bias = floats(gates[4])[0] * norm, floats(gates[5])
    beta = _sigmoid(factor * c + bias[0]), _sigmoid(factor * e + bias[1])
    return alpha, (beta[0] + beta[0], beta[1] + beta[1]), norm


def _mixed(token: Any, alpha: Any) -> Any:
    """m = Σ_o α^o h^o"""
    return alpha[0] * token.h[0] + alpha[1] * token.h[1]


@loop
def mix(into: Any, token: Any, alpha: Any) -> Any:
    """-> |m|²"""
    x = into.set(_mixed(token, alpha))
    return x * x


@kernel(Inputs)
def _gated_read(first: int, last: int, sums: int, scratch: int, table: int, kind: Any) -> None:
    inputs = unpack(table, Inputs)
    width, tokens, count, own = inputs.width, inputs.tokens, inputs.terms, _parameters(inputs)
    coefficients, next_coefficients = floats(inputs.coefficients), floats(inputs.next_coefficients)
    _clear(scratch, 2, width)  # the live streams, which remain zero without updates
    for t in range(first, last):
        token, found = _token(t, scratch, inputs, kind), ALONE
        if count > 0:
            sum_updates(t, 0, token.live, token.live, inputs, kind)
            found = _weights(t, stream_products(width, token, own, ()), inputs)
        for k in range(count):
            at = 2 * k * tokens + t
            a, b = coefficients[at], coefficients[at + tokens]
            next_coefficients[at] = found.rho * a + (ONE - found.rho) * b
            next_coefficients[at + tokens] = found.rho * b + (ONE - found.rho) * a
        alpha, beta, _ = _gates(merge_streams(width, token, found, own), inputs)
        at, h = 2 * count * tokens + t, row_at(inputs.h, t, width, kind)
        next_coefficients[at], next_coefficients[at + tokens] = beta
        if inputs.norm != 0:
            factor = _inverse_norm(mix(width, token.mixed, token, alpha), width, inputs.norm_eps)
            scale(width, h, factor, token.mixed, own.norm)
        else:
            mix(width, h, token, alpha)


@loop
def mix_products(token: Any, alpha: Any, norm: Any, gradient: Any) -> Any:
    """|m|² and Σ_d w m g"""
    m = _mixed(token, alpha)
    return m * m, norm * m * gradient


@loop
def mix_backward(token: Any, alpha: Any, gradient: Any, normed: Any) -> Any:
    """dm, through the norm if any -> dm · h^o of both outputs"""
    x = gradient
    if normed:
        norm, d_norm, factor, shrink = normed
        m = _mixed(token, alpha)
        d_norm.add(factor * m * gradient)
        x = factor * norm * gradient - shrink * m
    token.mixed.set(x)
    return x * token.h[0], x * token.h[1]


class GateGradients(NamedTuple):
    """The weights of rows in the gradients of the output streams."""

    alpha: Any
    products: Any  # the gradients of Σ_o h^o·W^o, for each of the gates' weights
    shrink: Any  # of −h^o itself, through the norm of [h⁰; h¹]


@loop
def gates_backward(token: Any, back: Any, own: Any, d_own: Any, mass: Any, d_retrieved: Any, other: Any) -> Any:
    """dh^o, which replaces h^o, and dh̃^o -> Σ_d dh^o (P^value − h̃^o) of both outputs"""
    sums = []
    for o, h in enumerate(token.h):
        x = back.alpha[o] * token.mixed - back.shrink * h
        for de, weight, d_weight in zip(back.products, own.weights, d_own.weights, strict=True):
            x = x + de * weight[o]
            d_weight[o].add(de * h)
        h.set(x)
        d_retrieved[o].set(mass[o] * x + other[o])
        sums.append(x * (token.values[o] - token.retrieved[o]))
    return tuple(sums)


class StreamGradients(NamedTuple):
    """The weights of rows in the gradients of the live streams."""

    rests: Any  # of dh^o in dP^j: [j][o]
    slopes: Any  # of the queries in dP^j: [j][o]
    itself: Any  # of P^j
    rho: Any
    swap: Any  # 1 − ρ
    product: Any  # the gradient of Σ_j P^j·W_ρ^j


@loop
def streams_backward(token: Any, back: Any, own: Any, d_own: Any, after: Any, carrier: Any) -> None:
    """dP^j, which replaces P^j: through values, keys, ρ's gate, and M(ρ)"""
    live = token.live
    for o in range(2):
        d_own.query[o].add(back.slopes[0][o] * live[0] + back.slopes[1][o] * live[1])
    for j in range(2):
        d_own.rho[j].add(back.product * live[j])
        x = back.rests[j][0] * token.h[0] + back.rests[j][1] * token.h[1]
        x = x + (back.slopes[j][0] * own.query[0] + back.slopes[j][1] * own.query[1])
        x = x + (back.itself[j] * live[j] + back.product * own.rho[j])
        x = live[j].set(x + (back.rho * after[j] + back.swap * after[1 - j]))
        for row in carrier[j : j + 1]:
            row.set(x)


@compiled
def _gate_backward(dz: Any, product: Any, norm: Any, scale: int, sums: int, scale_at: int, bias_at: int) -> Any:
    """Back through z = scale · norm · product + bias. -> the gradients of the product and of product · norm's norm"""
    total = pointer(sums, types.float64)
    total[bias_at] += dz
    total[scale_at] += dz * norm * product
    return dz * floats(scale)[0] * norm, dz * floats(scale)[0] * product


@compiled
def _back_to_gates(t: int, gates: Any, products: Any, d_alpha: Any, sums: int, scales: int, inputs: Any) -> Any:
    alpha, beta, norm = gates
    _, a, b, c, e = products
    alpha_scale, beta_scale = integers(inputs.gates)[1], integers(inputs.gates)[4]
    d_beta, biases = floats(inputs.next_coefficients), scales + (3 if inputs.terms > 0 else 2)
    at = 2 * inputs.terms * inputs.tokens + t
    dz = d_alpha[0] * alpha[0] * (ONE - alpha[0])
    da, by_a = _gate_backward(dz, a, norm, alpha_scale, sums, scales, biases)
    dz = d_alpha[1] * alpha[1] * (ONE - alpha[1])
    db, by_b = _gate_backward(dz, b, norm, alpha_scale, sums, scales, biases + 1)
    dz = d_beta[at] * beta[0] * (ONE - HALF * beta[0])
    dc, by_c = _gate_backward(dz, c, norm, beta_scale, sums, scales + 1, biases + 2)
    dz = d_beta[at + inputs.tokens] * beta[1] * (ONE - HALF * beta[1])
    de, by_e = _gate_backward(dz, e, norm, beta_scale, sums, scales + 1, biases + 3)
    return GateGradients(alpha, (da, db, dc, de), _shrink(norm, by_a + by_b + by_c + by_e, 2 * inputs.width))


@compiled
def _by_stream(numbers: Any, stream: Any) -> Any:
    """A number of each output where its stream is: [j][o]"""
    one, other = numbers
    first, second = stream[0] == 0, stream[1] == 0
    return (one if first else ZERO, other if second else ZERO), (ZERO if first else one, ZERO if second else other)


@compiled
def _back_to_streams(t: int, found: Any, d_rest: Any, sums: int, scales: int, inputs: Any) -> Any:
    tokens, width, d_partition = inputs.tokens, inputs.width, floats(inputs.d_partition)
    coefficients, d_next, d_rho = floats(inputs.coefficients), floats(inputs.next_coefficients), found.crossed
    for k in range(inputs.terms):
        at = 2 * k * tokens + t
        d_rho += (d_next[at] - d_next[at + tokens]) * (coefficients[at] - coefficients[at + tokens])
    dz, rho_scale = d_rho * found.rho * (ONE - found.rho), integers(inputs.gates)[7]
    product, d_norm = _gate_backward(dz, found.rho_product, found.rho_norm, rho_scale, sums, scales + 2, scales + 7)
    through_norm = _shrink(found.rho_norm, d_norm, 2 * width)
    d_score, other = d_rest[0] * found.own[0] * found.rest[0], d_rest[1] * found.own[1] * found.rest[1]
    d_partition[t], d_partition[tokens + t] = -d_score, -other
    slope, other_slope = d_score * found.norms[0], other * found.norms[1]
    through_keys = slope * found.scores[0] * found.norms[0], other_slope * found.scores[1] * found.norms[1]
    slopes = _by_stream((slope, other_slope), integers(inputs.key))
    (a, b), (c, e) = _by_stream(through_keys, integers(inputs.key))
    itself = -through_norm - (a + b) / np.float32(width), -through_norm - (c + e) / np.float32(width)
    rests = _by_stream(found.rest, integers(inputs.value))
    return StreamGradients(rests, slopes, itself, found.rho, ONE - found.rho, product)


@compiled
def _back_to_updates(t: int, rho: Any, d_live: Any, inputs: Any, kind: Any) -> None:
    tokens, width, fresh, d_next = inputs.tokens, inputs.width, inputs.carried, floats(inputs.next_coefficients)
    coefficients, d_coefficients = floats(inputs.coefficients), floats(inputs.d_coefficients)
    for k in range(inputs.terms):
        at = 2 * k * tokens + t
        one = rho * d_next[at] + (ONE - rho) * d_next[at + tokens]
        two = rho * d_next[at + tokens] + (ONE - rho) * d_next[at]
        if k >= fresh:
            update = row_at(integers(inputs.updates)[k], t, width, kind)
            d_update = row_at(integers(inputs.d_updates)[k - fresh], t, width, kind)
            weights = coefficients[at], coefficients[at + tokens]
            products = update_backward(width, d_update, (), (update,), weights, d_live)
            one, two = one + products[0], two + products[1]
        d_coefficients[at], d_coefficients[at + tokens] = one, two


@kernel(Inputs)
def _gated_read_backward(first: int, last: int, sums: int, scratch: int, table: int, kind: Any) -> None:
    inputs = unpack(table, Inputs)
    width, count, own = inputs.width, inputs.terms, _parameters(inputs)
    # Sums: query, α, β, ρ, norm, of which query and ρ only with updates; then scales and biases, from `scales` on.
    live_rows = 2 if count > 0 else 0
    parameters = 2 * live_rows + 8 + (1 if inputs.norm != 0 else 0)
    scales, rows = parameters * width, _place(scratch, BACKWARD_ROWS, width)
    d_weights = (
        _two_rows(rows, live_rows, width),
        _two_rows(rows, live_rows + 2, width),
        _two_rows(rows, live_rows + 4, width),
        _two_rows(rows, live_rows + 6, width),
    )
    d_rho, d_norm = _two_rows(rows, live_rows + 8, width), _row(rows, 2 * live_rows + 8, width)
    d_own = Parameters(_two_rows(rows, 0, width), d_weights, d_rho, d_norm)
    zero = pointer(_place(scratch, ROWS, width), kind)
    _clear(scratch, BACKWARD_ROWS + parameters, width)
    for t in range(first, last):
        if (t - first) % CHUNK == CHUNK - 1:
            _flush(sums, scratch, parameters, width)
        token, found, gradient = _token(t, scratch, inputs, kind), ALONE, row_at(inputs.h, t, width, kind)
        after, other = (zero, zero), (zero, zero)
        if inputs.d_after != 0:
            after = _streams_at(inputs.d_after, t, inputs, kind)
        if inputs.d_other != 0:
            other = _streams_at(inputs.d_other, t, inputs, kind)
        if count > 0:
            sum_updates(t, 0, token.live, token.live, inputs, kind)
            found = _weights(t, stream_products(width, token, own, after), inputs)
        products = merge_streams(width, token, found, own)
        gates = _gates(products, inputs)
        alpha = gates[0]
        if inputs.norm != 0:
            size, product = mix_products(width, token, alpha, own.norm, gradient)
            factor = _inverse_norm(size, width, inputs.norm_eps)
            normed = own.norm, d_own.norm, factor, _shrink(factor, product, width)
            d_alpha = mix_backward(width, token, alpha, gradient, normed)
        else:
            d_alpha = mix_backward(width, token, alpha, gradient, ())
        back = _back_to_gates(t, gates, products, d_alpha, sums, scales, inputs)
        d_retrieved = _streams_at(inputs.d_retrieved, t, inputs, kind)
        d_rest = gates_backward(width, token, back, own, d_own, found.own, d_retrieved, other)
        if count == 0:
            continue
        d_streams = _back_to_streams(t, found, d_rest, sums, scales, inputs)
        if inputs.d_carrier != 0:
            carrier = _streams_at(inputs.d_carrier, t, inputs, kind)
            streams_backward(width, token, d_streams, own, d_own, after, carrier)
        else:
            streams_backward(width, token, d_streams, own, d_own, after, ())
        _back_to_updates(t, found.rho, token.live, inputs, kind)
    _flush(sums, scratch, parameters, width)
