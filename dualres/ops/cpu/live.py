"""Reads (phase 2) and writes of the live streams on a CPU.

A read computes a token's live streams, merge, gates, branch input and norm while its rows are in the cache.
"""
# N tokens  D width  J stored streams  O output streams  K updates

import math
from typing import Any

import numpy as np
from torch import Tensor

from dualres.ops.arguments import ReadArguments, WriteArguments
from dualres.ops.cpu.compiler import compiled
from dualres.ops.cpu.launch import (
    ABSENT,
    LIKE,
    addresses,
    array,
    parallel_for,
    parallel_sums,
    stream_addresses,
    tokenwise,
)
from dualres.ops.cpu.rows import (
    add,
    add_to_four,
    add_to_two,
    blend,
    blend_with_dots,
    dot,
    finish,
    inverse_norm,
    load,
    normalize,
    normalize_backward,
    row_of,
    scaled,
    store,
    sum_of_six,
    target,
    two_dots,
)


def read(arguments: ReadArguments, results: list[Tensor]) -> None:
    h, next_coefficients = results
    inputs, after = _inputs(arguments), tokenwise(next_coefficients if arguments.gates else None, 2)
    tokens = arguments.log_partition[0].numel()
    parallel_for(lambda part, first, last: _read(first, last, inputs, h.data_ptr(), after), tokens)


def _inputs(arguments: ReadArguments) -> tuple[Any, ...]:
    """The arguments as compiled code takes them."""
    return (
        *_arrays(arguments),
        np.array(arguments.key),
        np.array(arguments.value),
        arguments.retrieved.shape[-1],
        arguments.eps,
        arguments.norm_eps,
        LIKE[arguments.retrieved.dtype],
    )


def _arrays(tensors: ReadArguments) -> tuple[Any, ...]:
    """The tensors of the arguments, or their gradients, as compiled code takes them; absent ones are empty arrays."""
    gates = [array(parameter) for parameter in tensors.gates]
    gates += [ABSENT[axes] for axes in (3, 1, 1)] * (3 - len(gates) // 3)
    return (
        stream_addresses([tensors.retrieved])[0],
        tokenwise(tensors.log_partition, 1),
        addresses(tensors.updates),
        tokenwise(tensors.coefficients, 2),
        array(tensors.query, 2),
        (tuple(gates[0:3]), tuple(gates[3:6]), tuple(gates[6:9])),
        array(tensors.norm),
    )


@compiled
def live_streams(live: Any, updates: Any, coefficients: Any, t: int, like: Any) -> None:
    """P^j = Σ_k C_k^j u_k of token t. (J,D), (K,), (K,J,N)"""
    streams, width = live.shape
    live[:] = 0
    for k in range(len(updates)):
        row = row_of(updates[k], t, width, like)
        for j in range(0, streams - 1, 2):
            add_to_two(live[j], live[j + 1], coefficients[k, j, t], coefficients[k, j + 1, t], row)
        if streams % 2 == 1:
            add(live[streams - 1], coefficients[k, streams - 1, t], row)


@compiled
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^−x)"""
    return np.float32(1 / (1 + math.exp(-x)))


@compiled
def gate_value(gate: Any, g: int, norm: Any, projected: Any) -> Any:
    """σ(scale · norm · e + bias) of value g with e = Σ_j x^j·W^j. projected (G,)"""
    _, scale, bias = gate
    return sigmoid(scale[0] * norm * projected[g] + bias[g])


@compiled
def _weigh(t: int, partition: Any, live: Any, queries: Any, key: Any, eps: float, weights: Any) -> None:
    """q·Norm(P), the inverse norm of P, λ and 1 − λ of each output. 4 × (O,)"""
    scores, norms, masses, rests = weights
    masses[:] = 1
    rests[:] = 0
    for o in range(len(queries)):
        scored = live[key[o]]
        square, product = two_dots(scored, queries[o], scored)
        norms[o] = inverse_norm(square, len(scored), eps)
        scores[o] = product * norms[o]
        masses[o] = sigmoid(partition[o, t] - scores[o])
        rests[o] = sigmoid(scores[o] - partition[o, t])


@compiled
def _merge_and_gate(t: int, inputs: Any, live: Any, weights: Any, h: Any, projected: Any, gate_values: Any) -> Any:
    """h^o = λ h̃^o + (1 − λ) P^value, their projections Σ_o h^o·W^o, and α and β computed from these.

    h (2,D), projected (4,), gate_values 2 × (2,) -> the inverse norm of [h⁰; h¹]
    """
    retrieved, _, _, _, _, (alpha, beta, _), _, _, value, _, eps, _, like = inputs
    alpha_weight, beta_weight = alpha[0], beta[0]
    _, _, masses, rests = weights
    read_gate, write_gate = gate_values
    total = np.float32(0)
    projected[:] = 0
    for o in range(2):
        row = row_of(retrieved[o], t, h.shape[1], like)
        four = (alpha_weight[0, o], alpha_weight[1, o], beta_weight[0, o], beta_weight[1, o])
        square, a, b, c, e = blend_with_dots(h[o], masses[o], row, rests[o], live[value[o]], four)
        total += square
        projected[0] += a
        projected[1] += b
        projected[2] += c
        projected[3] += e
    scale = inverse_norm(total, h.size, eps)
    for o in range(2):
        read_gate[o] = gate_value(alpha, o, scale, projected[:2])
        write_gate[o] = 2 * gate_value(beta, o, scale, projected[2:])
    return scale


@compiled
def _transport(live: Any, gate: Any, eps: float, projected: Any) -> Any:
    """ρ of the live streams (J,D), and the inverse norm of [P⁰; P¹]; stores Σ_j P^j·W^j in `projected` (1,)."""
    total = np.float32(0)
    projected[0] = 0
    for j in range(len(live)):
        square, product = two_dots(live[j], gate[0][0, j], live[j])
        total += square
        projected[0] += product
    norm = inverse_norm(total, live.size, eps)
    return gate_value(gate, 0, norm, projected), norm


@compiled
def _read(first: int, last: int, inputs: Any, output: int, next_coefficients: Any) -> None:
    retrieved, partition, updates, coefficients, queries, gates, norm, key, value, width, eps, norm_eps, like = inputs
    alpha, _, rho = gates
    outputs, streams, count = len(retrieved), coefficients.shape[1], len(updates)
    live = np.zeros((streams if count > 0 else 2, width), np.float32)  # zeros without updates, with λ = 1
    h, mixed = np.empty((outputs, width), np.float32), np.empty(width, np.float32)
    weights, projected = np.empty((4, outputs), np.float32), np.empty(4, np.float32)
    read_gate, rho_projected = np.empty(2, np.float32), np.empty(1, np.float32)
    _, _, masses, rests = weights
    for t in range(first, last):
        row = row_of(output, t, width, like)
        result = target(row, mixed)
        if count > 0:
            live_streams(live, updates, coefficients, t, like)
        _weigh(t, partition, live, queries, key, eps, weights)
        if len(alpha[0]) > 0:
            _merge_and_gate(t, inputs, live, weights, h, projected, (read_gate, next_coefficients[count, :, t]))
            square = blend(result, read_gate[0], h[0], read_gate[1], h[1])
        else:
            retrieved_row = row_of(retrieved[0], t, width, like)
            square = blend(result, masses[0], retrieved_row, rests[0], live[value[0]])
        if len(rho[0]) > 0:
            keep, _ = _transport(live, rho, eps, rho_projected)
            for k in range(count):
                for j in range(2):
                    next_coefficients[k, j, t] = keep * coefficients[k, j, t] + (1 - keep) * coefficients[k, 1 - j, t]
        if len(norm) > 0:
            normalize(result, norm, square, norm_eps)
        finish(row, result)


def read_backward(d_h: Tensor, d_next: Tensor, arguments: ReadArguments, gradients: ReadArguments) -> None:
    inputs, d_after = _inputs(arguments), tokenwise(d_next if arguments.gates else None, 2)

    def work(first: int, last: int, own: list[Any]) -> None:
        query, *gates, norm = own
        outputs = _arrays(gradients._replace(query=query, gates=gates, norm=norm))
        _read_backward(first, last, inputs, d_h.data_ptr(), d_after, outputs)

    parallel_sums(work, d_h[..., 0].numel(), [gradients.query, *gradients.gates, gradients.norm])


@compiled
def gate_backward(dz: Any, g: int, gate: Any, d_gate: Any, norm: Any, projected: Any) -> Any:
    """Back through value g, z = scale · norm · e + bias: turns e into its gradient, adds to the scale's and the bias's.

    -> the norm's gradient
    """
    _, scale, _ = gate
    _, d_scale, d_bias = d_gate
    e = projected[g]
    d_bias[g] += dz
    d_scale[0] += dz * norm * e
    projected[g] = np.float32(dz * scale[0] * norm)
    return dz * scale[0] * e


@compiled
def norm_backward(d_norm: Any, norm: Any, size: int) -> Any:
    """The factor of x in its gradient through norm = 1 / √(mean x² + eps) over `size` numbers."""
    return np.float32(-d_norm * norm * norm * norm / size)


@compiled
def _read_backward(first: int, last: int, inputs: Any, d_output: int, d_next: Any, gradients: Any) -> None:
    retrieved, partition, updates, coefficients, queries, gates, norm, key, value, width, eps, norm_eps, like = inputs
    d_retrieved, d_partition, d_updates, d_coefficients, d_queries, d_gates, d_norm = gradients
    (alpha, beta, rho), (d_alpha, d_beta, d_rho) = gates, d_gates
    alpha_weight, beta_weight, rho_weight = alpha[0], beta[0], rho[0]
    d_alpha_weight, d_beta_weight, d_rho_weight = d_alpha[0], d_beta[0], d_rho[0]
    outputs, streams, count = len(retrieved), coefficients.shape[1], len(updates)
    live = np.zeros((streams if count > 0 else 2, width), np.float32)
    d_live = np.empty((streams, width), np.float32)
    h, d_h = np.empty((outputs, width), np.float32), np.empty((outputs, width), np.float32)
    gradient, mixed = np.empty(width, np.float32), np.empty(width, np.float32)
    weights, projected = np.empty((4, outputs), np.float32), np.empty(4, np.float32)
    scores, norms, masses, rests = weights
    read_gate, write_gate = np.empty((2, 2), np.float32)
    rho_projected = np.zeros(1, np.float32)  # later its gradient
    slopes = np.empty(outputs, np.float32)  # the gradients of q·P
    valued, keyed = np.zeros((2, 2), np.float32)  # weights of d_h and of the queries in a live stream's gradient
    for t in range(first, last):
        load(gradient, row_of(d_output, t, width, like))
        if count > 0:
            live_streams(live, updates, coefficients, t, like)
        _weigh(t, partition, live, queries, key, eps, weights)
        if len(alpha_weight) > 0:
            scale = _merge_and_gate(t, inputs, live, weights, h, projected, (read_gate, write_gate))
            square = blend(mixed, read_gate[0], h[0], read_gate[1], h[1])
            if len(norm) > 0:
                normalize_backward(gradient, mixed, norm, square, norm_eps, d_norm)
            d_read_gate, d_scale = two_dots(h[0], h[1], gradient), np.float32(0)
            for o in range(2):
                dz = d_read_gate[o] * read_gate[o] * (1 - read_gate[o])
                d_scale += gate_backward(dz, o, alpha, d_alpha, scale, projected[:2])
                dz = d_next[count, o, t] * write_gate[o] * (1 - write_gate[o] / 2)
                d_scale += gate_backward(dz, o, beta, d_beta, scale, projected[2:])
            shrink = norm_backward(d_scale, scale, h.size)
            a, b, c, e = projected  # by now the gradients of the projections
            for o in range(2):
                d_four = (d_alpha_weight[0, o], d_alpha_weight[1, o], d_beta_weight[0, o], d_beta_weight[1, o])
                add_to_four(d_four, (a, b, c, e), h[o])
                four = (alpha_weight[0, o], alpha_weight[1, o], beta_weight[0, o], beta_weight[1, o])
                factors = (read_gate[o], shrink, a, b, c, e)
                sum_of_six(d_h[o], factors, (gradient, h[o], *four))
        else:
            retrieved_row = row_of(retrieved[0], t, width, like)
            square = blend(h[0], masses[0], retrieved_row, rests[0], live[value[0]])
            if len(norm) > 0:
                normalize_backward(gradient, h[0], norm, square, norm_eps, d_norm)
            d_h[0] = gradient
        for o in range(outputs):
            scaled(row_of(d_retrieved[o], t, width, like), masses[o], d_h[o])
            if count > 0:
                by_live, by_retrieved = two_dots(live[value[o]], row_of(retrieved[o], t, width, like), d_h[o])
                d_score = (by_live - by_retrieved) * masses[o] * rests[o]
                d_partition[o, t] = -d_score
                slopes[o] = d_score * norms[o]
                add(d_queries[o], slopes[o], live[key[o]])
        keep, shrunk = np.float32(1), np.float32(0)
        if len(rho_weight) > 0:
            keep, whole = _transport(live, rho, eps, rho_projected)
            d_keep = np.float32(0)
            for k in range(count):
                d_keep += (d_next[k, 0, t] - d_next[k, 1, t]) * (coefficients[k, 0, t] - coefficients[k, 1, t])
            dz = d_keep * keep * (1 - keep)
            shrunk = norm_backward(gate_backward(dz, 0, rho, d_rho, whole, rho_projected), whole, live.size)
            for j in range(2):
                add(d_rho_weight[0, j], rho_projected[0], live[j])
        if count > 0:
            for j in range(streams):
                itself = shrunk
                for o in range(outputs):
                    valued[o] = rests[o] if value[o] == j else 0
                    keyed[o] = slopes[o] if key[o] == j else 0
                    itself -= np.float32(keyed[o] * scores[o] * norms[o] / width)
                gate = rho_weight[0, j] if len(rho_weight) > 0 else live[j]
                sum_of_six(
                    d_live[j],
                    (valued[0], valued[1], keyed[0], keyed[1], itself, rho_projected[0]),
                    (d_h[0], d_h[outputs - 1], queries[0], queries[outputs - 1], live[j], gate),
                )
        for k in range(count):
            other = coefficients[k, streams - 1, t] if streams > 1 else np.float32(0)
            blend(row_of(d_updates[k], t, width, like), coefficients[k, 0, t], d_live[0], other, d_live[streams - 1])
            if len(d_coefficients) > 0:
                products = two_dots(d_live[0], d_live[1], row_of(updates[k], t, width, like))
                for j in range(2):
                    carried = keep * d_next[k, j, t] + (1 - keep) * d_next[k, 1 - j, t]
                    d_coefficients[k, j, t] = carried + products[j]


def write(arguments: WriteArguments, results: list[Tensor]) -> None:
    (live,) = results
    inputs = (*_live_arrays(arguments), stream_addresses([live])[0], live.shape[-1], LIKE[live.dtype])
    parallel_for(lambda part, first, last: _write(first, last, inputs), live[0, ..., 0].numel())


def _live_arrays(tensors: WriteArguments) -> tuple[Any, ...]:
    """The arguments, or their gradients, as compiled code takes them."""
    return addresses(tensors.updates), tokenwise(tensors.coefficients, 2)


@compiled
def _write(first: int, last: int, inputs: Any) -> None:
    updates, coefficients, live, width, like = inputs
    sums = np.empty((len(live), width), np.float32)
    for t in range(first, last):
        live_streams(sums, updates, coefficients, t, like)
        for j in range(len(live)):
            store(row_of(live[j], t, width, like), sums[j])


def write_backward(d_live: Tensor, arguments: WriteArguments, gradients: WriteArguments) -> None:
    incoming = (stream_addresses([d_live])[0], d_live.shape[-1], LIKE[d_live.dtype])
    inputs = (*_live_arrays(arguments), *_live_arrays(gradients), *incoming)
    parallel_for(lambda part, first, last: _write_backward(first, last, inputs), d_live[0, ..., 0].numel())


@compiled
def _write_backward(first: int, last: int, inputs: Any) -> None:
    updates, coefficients, d_updates, d_coefficients, d_live, width, like = inputs
    row, gradient = np.empty(width, np.float32), np.empty((len(d_live), width), np.float32)
    for t in range(first, last):
        for j in range(len(d_live)):
            load(gradient[j], row_of(d_live[j], t, width, like))
        for k in range(len(d_updates)):
            if len(d_coefficients) > 0:
                load(row, row_of(updates[k], t, width, like))
                for j in range(len(d_live)):
                    d_coefficients[k, j, t] = dot(row, gradient[j])
            row[:] = 0
            for j in range(len(d_live)):
                add(row, coefficients[k, j, t], gradient[j])
            store(row_of(d_updates[k], t, width, like), row)
