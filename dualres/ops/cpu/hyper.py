"""The read of mHC on a CPU: streams, gates, Sinkhorn, branch input and norm of a token while its rows are cached."""
# N tokens  D width  J streams  K updates  G gate values

import math
from typing import Any

import numpy as np
from torch import Tensor

from dualres.ops.arguments import HyperReadArguments
from dualres.ops.cpu.compiler import compiled
from dualres.ops.cpu.launch import LIKE, addresses, array, parallel_for, parallel_sums, tokenwise
from dualres.ops.cpu.live import gate_backward, gate_value, live_streams, norm_backward
from dualres.ops.cpu.rows import (
    add,
    add_rows,
    add_to_two,
    dot,
    inverse_norm,
    load,
    normalize,
    normalize_backward,
    row_of,
    scaled,
    store,
    two_dots,
)


def hyper_read(arguments: HyperReadArguments, results: list[Tensor]) -> None:
    h, next_coefficients = results
    inputs, after, tokens = _inputs(arguments), tokenwise(next_coefficients, 2), h[..., 0].numel()
    parallel_for(lambda part, first, last: _forward(first, last, inputs, h.data_ptr(), after), tokens)


def _inputs(arguments: HyperReadArguments) -> tuple[Any, ...]:
    """The arguments as compiled code takes them."""
    update = arguments.updates[0]
    numbers = (update.shape[-1], arguments.steps, arguments.eps, arguments.norm_eps)
    return (*_arrays(arguments), *numbers, LIKE[update.dtype])


def _arrays(tensors: HyperReadArguments) -> tuple[Any, ...]:
    """The tensors of the arguments, or of their gradients, as compiled code takes them.

    The weights of a gate value are one row over all streams.
    """
    gates = [array(gate.flatten(1) if gate.ndim == 3 else gate) for gate in tensors.gates]
    return (
        addresses(tensors.updates),
        tokenwise(tensors.coefficients, 2),
        (tuple(gates[0:3]), tuple(gates[3:6]), tuple(gates[6:9])),
        array(tensors.norm),
    )


@compiled
def _project(projected: Any, weight: Any, streams: Any) -> None:
    """e_g = Σ_j x^j · W_g^j. (G,), (G,J·D), (J·D,)"""
    for g in range(0, len(weight), 2):
        other = min(g + 1, len(weight) - 1)
        projected[g], projected[other] = two_dots(weight[g], weight[other], streams)


@compiled
def _sinkhorn(logits: Any, steps: int, trace: Any) -> None:
    """The matrix after every half-step: columns, rows, columns, … (J,J), (2·steps,J,J) float64

    Computed in linear space, which is fast, or in log space if a row or column would underflow.
    """
    size = len(logits)
    matrix = np.empty((size, size), np.float64)
    for j in range(size):
        highest = logits[0, j]
        for i in range(size):
            highest = max(highest, logits[i, j])
        for i in range(size):
            matrix[i, j] = math.exp(np.float64(logits[i, j]) - highest)
    for step in range(2 * steps):
        for a in range(size):
            total = 0.0
            for b in range(size):
                total += matrix[b, a] if step % 2 == 0 else matrix[a, b]
            if total < 1e-200:
                _sinkhorn_in_log_space(logits, steps, trace)
                return
            for b in range(size):
                if step % 2 == 0:
                    matrix[b, a] /= total
                else:
                    matrix[a, b] /= total
        trace[step] = matrix


@compiled
def _sinkhorn_in_log_space(logits: Any, steps: int, trace: Any) -> None:
    size = len(logits)
    work = logits.astype(np.float64)
    for step in range(2 * steps):
        for a in range(size):
            row_or_column = work[:, a] if step % 2 == 0 else work[a]
            highest = row_or_column.max()
            total = 0.0
            for b in range(size):
                total += math.exp(row_or_column[b] - highest)
            for b in range(size):
                row_or_column[b] -= highest + math.log(total)
        trace[step] = np.exp(work)


@compiled
def by_gate(values: Any, streams: int) -> Any:
    """The values of H_pre, H_post and H_res. (G,) -> (J,), (J,), (J·J,)"""
    return values[:streams], values[streams : 2 * streams], values[2 * streams :]


@compiled
def _gates(streams: Any, scale: Any, gates: Any, projected: Any, read_gate: Any, write_gate: Any, logits: Any) -> None:
    """H_pre, H_post and the logits of H_res from the streams (J·D,) of a token; stores the projections (G,)."""
    pre, post, mixing = gates
    size = len(read_gate)
    pre_projected, post_projected, mixing_projected = by_gate(projected, size)
    _project(pre_projected, pre[0], streams)
    _project(post_projected, post[0], streams)
    _project(mixing_projected, mixing[0], streams)
    for j in range(size):
        read_gate[j] = gate_value(pre, j, scale, pre_projected)
        write_gate[j] = 2 * gate_value(post, j, scale, post_projected)
        for i in range(size):
            g = i * size + j
            logits[i, j] = mixing[1][0] * scale * mixing_projected[g] + mixing[2][g]


@compiled
def _forward(first: int, last: int, inputs: Any, output: int, next_coefficients: Any) -> None:
    updates, coefficients, gates, norm, width, steps, eps, norm_eps, like = inputs
    size, count = coefficients.shape[1], len(updates)
    live, row = np.empty((size, width), np.float32), np.empty(width, np.float32)
    streams = live.reshape(size * width)
    projected, logits = np.empty(size * (size + 2), np.float32), np.empty((size, size), np.float32)
    read_gate, write_gate = np.empty((2, size), np.float32)
    trace = np.empty((2 * steps, size, size), np.float64)
    for t in range(first, last):
        live_streams(live, updates, coefficients, t, like)
        scale = inverse_norm(dot(streams, streams), len(streams), eps)
        _gates(streams, scale, gates, projected, read_gate, write_gate, logits)
        _sinkhorn(logits, steps, trace)
        for i in range(size):
            for k in range(count):
                total = 0.0
                for j in range(size):
                    total += trace[-1, i, j] * coefficients[k, j, t]
                next_coefficients[k, i, t] = total
            next_coefficients[count, i, t] = write_gate[i]
        row[:] = 0
        add_rows(row, read_gate, live)
        if len(norm) > 0:
            normalize(row, norm, dot(row, row), norm_eps)
        store(row_of(output, t, width, like), row)


def hyper_read_backward(
    d_h: Tensor, d_next: Tensor, arguments: HyperReadArguments, gradients: HyperReadArguments
) -> None:
    inputs, d_after = _inputs(arguments), tokenwise(d_next, 2)

    def work(first: int, last: int, own: list[Any]) -> None:
        *gates, norm = own
        _backward(first, last, inputs, d_h.data_ptr(), d_after, _arrays(gradients._replace(gates=gates, norm=norm)))

    parallel_sums(work, d_h[..., 0].numel(), [*gradients.gates, gradients.norm])


@compiled
def _sinkhorn_backward(trace: Any, d_matrix: Any) -> None:
    """Turns the gradient (J,J) of the last matrix into that of the logits: a half-step L' = L − lse(L) has
    dL = dL' − exp(L') Σ dL', summed over what it normalized."""
    size = len(d_matrix)
    for i in range(size):
        for j in range(size):
            d_matrix[i, j] *= trace[-1, i, j]
    for step in range(len(trace) - 1, -1, -1):
        for a in range(size):
            total = 0.0
            for b in range(size):
                total += d_matrix[b, a] if step % 2 == 0 else d_matrix[a, b]
            for b in range(size):
                if step % 2 == 0:
                    d_matrix[b, a] -= trace[step, b, a] * total
                else:
                    d_matrix[a, b] -= trace[step, a, b] * total


@compiled
def _backward(first: int, last: int, inputs: Any, d_output: int, d_next: Any, gradients: Any) -> None:
    updates, coefficients, gates, norm, width, steps, eps, norm_eps, like = inputs
    d_updates, d_coefficients, d_gates, d_norm = gradients
    (pre, post, mixing), (d_pre, d_post, d_mixing) = gates, d_gates
    size, count = coefficients.shape[1], len(updates)
    live, d_live = np.empty((size, width), np.float32), np.empty((size, width), np.float32)
    streams, d_streams = live.reshape(size * width), d_live.reshape(size * width)
    row, gradient = np.empty(width, np.float32), np.empty(width, np.float32)
    projected = np.empty(size * (size + 2), np.float32)
    de_pre, de_post, de_mixing = by_gate(projected, size)  # the projections, later their gradients
    logits = np.empty((size, size), np.float32)
    read_gate, write_gate = np.empty((2, size), np.float32)
    trace, d_matrix = np.empty((2 * steps, size, size), np.float64), np.empty((size, size), np.float64)
    for t in range(first, last):
        live_streams(live, updates, coefficients, t, like)
        scale = inverse_norm(dot(streams, streams), len(streams), eps)
        _gates(streams, scale, gates, projected, read_gate, write_gate, logits)
        _sinkhorn(logits, steps, trace)
        load(gradient, row_of(d_output, t, width, like))
        if len(norm) > 0:
            row[:] = 0
            add_rows(row, read_gate, live)
            normalize_backward(gradient, row, norm, dot(row, row), norm_eps, d_norm)
        for i in range(size):
            for j in range(size):
                d_matrix[i, j] = 0
                for k in range(count):
                    d_matrix[i, j] += d_next[k, i, t] * coefficients[k, j, t]
        for k in range(count):
            for j in range(size):
                carried = 0.0
                for i in range(size):
                    carried += trace[-1, i, j] * d_next[k, i, t]
                d_coefficients[k, j, t] = carried
        _sinkhorn_backward(trace, d_matrix)
        d_scale = np.float32(0)
        for j in range(size):
            dz = dot(gradient, live[j]) * read_gate[j] * (1 - read_gate[j])
            d_scale += gate_backward(dz, j, pre, d_pre, scale, de_pre)
            dz = d_next[count, j, t] * write_gate[j] * (1 - write_gate[j] / 2)
            d_scale += gate_backward(dz, j, post, d_post, scale, de_post)
        for g in range(size * size):
            dz = np.float32(d_matrix[g // size, g % size])
            d_scale += gate_backward(dz, g, mixing, d_mixing, scale, de_mixing)
        scaled(d_streams, norm_backward(d_scale, scale, len(streams)), streams)
        add_rows(d_streams, de_pre, pre[0])
        add_rows(d_streams, de_post, post[0])
        add_rows(d_streams, de_mixing, mixing[0])
        for j in range(size):
            add(d_live[j], read_gate[j], gradient)
            add_to_two(d_pre[0][j], d_post[0][j], de_pre[j], de_post[j], streams)
        for g in range(0, size * size - 1, 2):
            add_to_two(d_mixing[0][g], d_mixing[0][g + 1], de_mixing[g], de_mixing[g + 1], streams)
        if size % 2 == 1:
            add(d_mixing[0][size * size - 1], de_mixing[size * size - 1], streams)
        for k in range(count):
            load(row, row_of(updates[k], t, width, like))
            for j in range(size):
                d_coefficients[k, j, t] += dot(row, d_live[j])
            row[:] = 0
            for j in range(size):
                add(row, coefficients[k, j, t], d_live[j])
            store(row_of(d_updates[k], t, width, like), row)
