"""Reads (phase 2) and writes of the live streams on a CPU.

A read computes a token's live streams, merge, gates, branch input and norm while its rows are in the cache.
"""
# N tokens  D width  J stored streams  O output streams  K updates

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualres.ops.arguments import ReadArguments
from dualres.ops.cpu.compiler import compiled
from dualres.ops.cpu.launch import LIKE, addresses, array, parallel_for, parts, stream_addresses, tokenwise
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

ABSENT = {size: np.empty((0,) * size, np.float32) for size in (1, 2, 3)}


def read(arguments: ReadArguments) -> tuple[Tensor, Tensor]:
    partition = arguments.log_partition
    h = torch.empty_like(arguments.retrieved[0])
    next_coefficients = (
        partition.new_empty(len(arguments.updates) + 1, *partition.shape) if arguments.gates else partition.new_empty(0)
    )
    inputs, after = _arrays(arguments), tokenwise(next_coefficients, 2) if arguments.gates else ABSENT[3]
    parallel_for(lambda part, first, last: _read(first, last, inputs, h.data_ptr(), after), partition[0].numel())
    return h, next_coefficients


def _arrays(arguments: ReadArguments) -> tuple[Any, ...]:
    """The arguments as compiled code takes them; absent ones are empty arrays."""
    return (
        stream_addresses([arguments.retrieved])[0],
        tokenwise(arguments.log_partition, 1),
        addresses(arguments.updates),
        ABSENT[3] if arguments.coefficients is None else tokenwise(arguments.coefficients, 2),
        ABSENT[2] if arguments.query is None else array(arguments.query),
        np.array(arguments.key),
        np.array(arguments.value),
        _pad_to_three([array(gate) for gate in arguments.gates]),
        ABSENT[1] if arguments.norm is None else array(arguments.norm),
        arguments.retrieved.shape[-1],
        arguments.eps,
        arguments.norm_eps,
        LIKE[arguments.retrieved.dtype],
    )


def _pad_to_three(gates: list[Any]) -> tuple[Any, ...]:
    """The weight, scale and bias of three gates, with empty arrays for absent ones."""
    return (*gates, *[ABSENT[size] for size in (3, 1, 1)] * (3 - len(gates) // 3))


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
    retrieved, _, _, _, _, _, value, gates, _, _, eps, _, like = inputs
    alpha, alpha_scale, alpha_bias, beta, beta_scale, beta_bias, _, _, _ = gates
    _, _, masses, rests = weights
    read_gate, write_gate = gate_values
    total = np.float32(0)
    projected[:] = 0
    for o in range(2):
        row, four = row_of(retrieved[o], t, h.shape[1], like), (alpha[0, o], alpha[1, o], beta[0, o], beta[1, o])
        square, a, b, c, e = blend_with_dots(h[o], masses[o], row, rests[o], live[value[o]], four)
        total += square
        projected[0] += a
        projected[1] += b
        projected[2] += c
        projected[3] += e
    scale = inverse_norm(total, h.size, eps)
    for o in range(2):
        read_gate[o] = sigmoid(alpha_scale[0] * scale * projected[o] + alpha_bias[o])
        write_gate[o] = 2 * sigmoid(beta_scale[0] * scale * projected[2 + o] + beta_bias[o])
    return scale


@compiled
def _project(streams: Any, weight: Any) -> Any:
    """Σ_j x^j·x^j and Σ_j x^j·W^j. (J,D), (J,D) -> 2 numbers"""
    total, projected = np.float32(0), np.float32(0)
    for j in range(len(streams)):
        square, product = two_dots(streams[j], weight[j], streams[j])
        total += square
        projected += product
    return total, projected


@compiled
def _read(first: int, last: int, inputs: Any, output: int, next_coefficients: Any) -> None:
    retrieved, partition, updates, coefficients, queries, key, value, gates, norm, width, eps, norm_eps, like = inputs
    _, _, _, _, _, _, rho, rho_scale, rho_bias = gates
    outputs, streams, count = len(retrieved), coefficients.shape[1], len(updates)
    live = np.zeros((streams if count > 0 else 2, width), np.float32)  # zeros without updates, with λ = 1
    h, mixed = np.empty((outputs, width), np.float32), np.empty(width, np.float32)
    weights, projected = np.empty((4, outputs), np.float32), np.empty(4, np.float32)
    read_gate = np.empty(2, np.float32)
    _, _, masses, rests = weights
    for t in range(first, last):
        row = row_of(output, t, width, like)
        result = target(row, mixed)
        if count > 0:
            live_streams(live, updates, coefficients, t, like)
        _weigh(t, partition, live, queries, key, eps, weights)
        if len(gates[0]) > 0:
            _merge_and_gate(t, inputs, live, weights, h, projected, (read_gate, next_coefficients[count, :, t]))
            square = blend(result, read_gate[0], h[0], read_gate[1], h[1])
        else:
            retrieved_row = row_of(retrieved[0], t, width, like)
            square = blend(result, masses[0], retrieved_row, rests[0], live[value[0]])
        if len(rho) > 0:
            whole, product = _project(live, rho[0])
            keep = sigmoid(rho_scale[0] * inverse_norm(whole, live.size, eps) * product + rho_bias[0])
            for k in range(count):
                for j in range(2):
                    next_coefficients[k, j, t] = keep * coefficients[k, j, t] + (1 - keep) * coefficients[k, 1 - j, t]
        if len(norm) > 0:
            normalize(result, norm, square, norm_eps)
        finish(row, result)


def read_backward(d_h: Tensor, d_next: Tensor, arguments: ReadArguments) -> list[Tensor]:
    tokens, inputs = arguments.log_partition[0].numel(), _arrays(arguments)
    d_retrieved, d_partition = torch.empty_like(arguments.retrieved), torch.empty_like(arguments.log_partition)
    d_updates = [torch.empty_like(update) for update in arguments.updates]
    learned = arguments.coefficients if arguments.gates else None
    d_coefficients = None if learned is None else torch.empty_like(learned)
    present = [parameter for parameter in (arguments.query, *arguments.gates, arguments.norm) if parameter is not None]
    partial = [parameter.new_zeros(parts(tokens), *parameter.shape) for parameter in present]
    rows = (
        d_h.data_ptr(),
        tokenwise(d_next, 2) if arguments.gates else ABSENT[3],
        stream_addresses([d_retrieved])[0],
        tokenwise(d_partition, 1),
        addresses(d_updates),
        ABSENT[3] if d_coefficients is None else tokenwise(d_coefficients, 2),
    )

    def work(part: int, first: int, last: int) -> None:
        own = iter([array(d_parameter[part]) for d_parameter in partial])
        d_queries = ABSENT[2] if arguments.query is None else next(own)
        d_gates = _pad_to_three([next(own) for _ in arguments.gates])
        d_norm = ABSENT[1] if arguments.norm is None else next(own)
        _read_backward(first, last, inputs, rows, d_queries, d_gates, d_norm)

    parallel_for(work, tokens)
    live = [d_partition, *d_updates] if arguments.updates else []
    if d_coefficients is not None:
        live.append(d_coefficients)
    return [d_retrieved, *live, *(d_parameter.sum(0) for d_parameter in partial)]


@compiled
def gate_backward(dz: Any, scale: Any, norm: Any, projected: Any) -> Any:
    """The gradients of e = Σ_j x^j·W^j, the scale and the norm through z = scale · norm · e + bias."""
    return np.float32(dz * scale * norm), dz * norm * projected, dz * scale * projected


@compiled
def norm_backward(d_norm: Any, norm: Any, size: int) -> Any:
    """The factor of x in its gradient through norm = 1 / √(mean x² + eps) over `size` numbers."""
    return np.float32(-d_norm * norm * norm * norm / size)


@compiled
def _read_backward(first: int, last: int, inputs: Any, rows: Any, d_queries: Any, d_gates: Any, d_norm: Any) -> None:
    retrieved, partition, updates, coefficients, queries, key, value, gates, norm, width, eps, norm_eps, like = inputs
    alpha, alpha_scale, _, beta, beta_scale, _, rho, rho_scale, rho_bias = gates
    d_output, d_next, d_retrieved, d_partition, d_updates, d_coefficients = rows
    d_alpha, d_alpha_scale, d_alpha_bias, d_beta, d_beta_scale, d_beta_bias, d_rho, d_rho_scale, d_rho_bias = d_gates
    outputs, streams, count = len(retrieved), coefficients.shape[1], len(updates)
    live = np.zeros((streams if count > 0 else 2, width), np.float32)
    d_live = np.empty((streams, width), np.float32)
    h, d_h = np.empty((outputs, width), np.float32), np.empty((outputs, width), np.float32)
    gradient, mixed = np.empty(width, np.float32), np.empty(width, np.float32)
    weights, projected = np.empty((4, outputs), np.float32), np.empty(4, np.float32)
    scores, norms, masses, rests = weights
    read_gate, write_gate = np.empty((2, 2), np.float32)
    slopes = np.empty(outputs, np.float32)  # the gradients of q·P
    valued, keyed = np.zeros((2, 2), np.float32)  # weights of d_h and of the queries in a live stream's gradient
    for t in range(first, last):
        load(gradient, row_of(d_output, t, width, like))
        if count > 0:
            live_streams(live, updates, coefficients, t, like)
        _weigh(t, partition, live, queries, key, eps, weights)
        if len(alpha) > 0:
            scale = _merge_and_gate(t, inputs, live, weights, h, projected, (read_gate, write_gate))
            square = blend(mixed, read_gate[0], h[0], read_gate[1], h[1])
            if len(norm) > 0:
                normalize_backward(gradient, mixed, norm, square, norm_eps, d_norm)
            d_read_gate, d_scale = two_dots(h[0], h[1], gradient), np.float32(0)
            for o in range(2):
                dz = d_read_gate[o] * read_gate[o] * (1 - read_gate[o])
                d_alpha_bias[o] += dz
                projected[o], ds, dm = gate_backward(dz, alpha_scale[0], scale, projected[o])
                d_alpha_scale[0] += ds
                d_scale += dm
                dz = d_next[count, o, t] * write_gate[o] * (1 - write_gate[o] / 2)
                d_beta_bias[o] += dz
                projected[2 + o], ds, dm = gate_backward(dz, beta_scale[0], scale, projected[2 + o])
                d_beta_scale[0] += ds
                d_scale += dm
            shrink = norm_backward(d_scale, scale, h.size)
            a, b, c, e = projected  # by now the gradients of the projections
            for o in range(2):
                add_to_four((d_alpha[0, o], d_alpha[1, o], d_beta[0, o], d_beta[1, o]), (a, b, c, e), h[o])
                four = (alpha[0, o], alpha[1, o], beta[0, o], beta[1, o])
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
        keep, d_projected, shrunk = np.float32(1), np.float32(0), np.float32(0)
        if len(rho) > 0:
            square, product = _project(live, rho[0])
            whole = inverse_norm(square, live.size, eps)
            keep = sigmoid(rho_scale[0] * whole * product + rho_bias[0])
            d_keep = np.float32(0)
            for k in range(count):
                d_keep += (d_next[k, 0, t] - d_next[k, 1, t]) * (coefficients[k, 0, t] - coefficients[k, 1, t])
            dz = d_keep * keep * (1 - keep)
            d_rho_bias[0] += dz
            d_projected, ds, dm = gate_backward(dz, rho_scale[0], whole, product)
            d_rho_scale[0] += ds
            shrunk = norm_backward(dm, whole, live.size)
            for j in range(2):
                add(d_rho[0, j], d_projected, live[j])
        if count > 0:
            for j in range(streams):
                itself = shrunk
                for o in range(outputs):
                    valued[o] = rests[o] if value[o] == j else 0
                    keyed[o] = slopes[o] if key[o] == j else 0
                    itself -= np.float32(keyed[o] * scores[o] * norms[o] / width)
                gate = rho[0, j] if len(rho) > 0 else live[j]
                sum_of_six(
                    d_live[j],
                    (valued[0], valued[1], keyed[0], keyed[1], itself, d_projected),
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


def write(updates: list[Tensor], coefficients: Tensor) -> Tensor:
    first_update, tokens = updates[0], coefficients[0, 0].numel()
    live = first_update.new_empty(coefficients.shape[1], *first_update.shape)
    arguments = (
        addresses(updates),
        tokenwise(coefficients, 2),
        stream_addresses([live])[0],
        first_update.shape[-1],
        LIKE[live.dtype],
    )
    parallel_for(lambda part, first, last: _write(first, last, arguments), tokens)
    return live


@compiled
def _write(first: int, last: int, arguments: Any) -> None:
    updates, coefficients, live, width, like = arguments
    sums = np.empty((len(live), width), np.float32)
    for t in range(first, last):
        live_streams(sums, updates, coefficients, t, like)
        for j in range(len(live)):
            store(row_of(live[j], t, width, like), sums[j])


def write_backward(d_live: Tensor, updates: list[Tensor], coefficients: Tensor) -> list[Tensor]:
    tokens = coefficients[0, 0].numel()
    d_updates = [torch.empty_like(d_live[0]) for _ in coefficients]
    d_coefficients = torch.empty_like(coefficients if updates else coefficients[:0])
    arguments = (
        stream_addresses([d_live])[0],
        addresses(updates),
        tokenwise(coefficients, 2),
        addresses(d_updates),
        tokenwise(d_coefficients, 2),
        d_live.shape[-1],
        LIKE[d_live.dtype],
    )
    parallel_for(lambda part, first, last: _write_backward(first, last, arguments), tokens)
    return [*d_updates, *([d_coefficients] if updates else [])]


@compiled
def _write_backward(first: int, last: int, arguments: Any) -> None:
    d_live, updates, coefficients, d_updates, d_coefficients, width, like = arguments
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
