"""The read of mHC on a CPU: streams, gates, Sinkhorn, branch input and norm of a token while its rows are cached."""
# N tokens  D width  J streams  K updates  G gate values

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualres.ops.arguments import HyperReadArguments
from dualres.ops.cpu.compiler import compiled
from dualres.ops.cpu.launch import LIKE, addresses, array, parallel_for, parts, tokenwise
from dualres.ops.cpu.live import ABSENT, live_streams, norm_backward, sigmoid
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


def hyper_read(arguments: HyperReadArguments) -> tuple[Tensor, Tensor]:
    updates, coefficients = arguments.updates, arguments.coefficients
    h, next_coefficients = (
        torch.empty_like(updates[0]),
        coefficients.new_empty(len(updates) + 1, *coefficients.shape[1:]),
    )
    inputs, after, tokens = _arrays(arguments), tokenwise(next_coefficients, 2), coefficients[0, 0].numel()
    parallel_for(lambda part, first, last: _forward(first, last, inputs, h.data_ptr(), after), tokens)
    return h, next_coefficients


def _arrays(arguments: HyperReadArguments) -> tuple[Any, ...]:
    """The arguments as compiled code takes them; the weights of a gate value are one row over all streams."""
    return (
        addresses(arguments.updates),
        tokenwise(arguments.coefficients, 2),
        tuple(array(gate.flatten(1)) if gate.ndim == 3 else array(gate) for gate in arguments.gates),
        ABSENT[1] if arguments.norm is None else array(arguments.norm),
        arguments.updates[0].shape[-1],
        arguments.steps,
        arguments.eps,
        arguments.norm_eps,
        LIKE[arguments.updates[0].dtype],
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
def _gates(streams: Any, scale: Any, gates: Any, projected: Any, read_gate: Any, write_gate: Any, logits: Any) -> None:
    """H_pre, H_post and the logits of H_res from the streams (J·D,) of a token; stores the projections (G,)."""
    pre, pre_scale, pre_bias, post, post_scale, post_bias, mixing, mixing_scale, mixing_bias = gates
    size = len(read_gate)
    _project(projected[:size], pre, streams)
    _project(projected[size : 2 * size], post, streams)
    _project(projected[2 * size :], mixing, streams)
    for j in range(size):
        read_gate[j] = sigmoid(pre_scale[0] * scale * projected[j] + pre_bias[j])
        write_gate[j] = 2 * sigmoid(post_scale[0] * scale * projected[size + j] + post_bias[j])
        for i in range(size):
            g = i * size + j
            logits[i, j] = mixing_scale[0] * scale * projected[2 * size + g] + mixing_bias[g]


@compiled
def _forward(first: int, last: int, inputs: Any, output: int, next_coefficients: Any) -> None:
    updates, coefficients, gates, norm, width, steps, eps, norm_eps, like = inputs
    size, count = len(gates[0]), len(updates)
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


def hyper_read_backward(d_h: Tensor, d_next: Tensor, arguments: HyperReadArguments) -> list[Tensor]:
    tokens, inputs = arguments.coefficients[0, 0].numel(), _arrays(arguments)
    d_updates = [torch.empty_like(update) for update in arguments.updates]
    d_coefficients = torch.empty_like(arguments.coefficients)
    parameters = [*arguments.gates, *([] if arguments.norm is None else [arguments.norm])]
    partial = [parameter.new_zeros(parts(tokens), *parameter.shape) for parameter in parameters]
    rows = d_h.data_ptr(), tokenwise(d_next, 2), addresses(d_updates), tokenwise(d_coefficients, 2)

    def work(part: int, first: int, last: int) -> None:
        own = [array(d[part].flatten(1)) if d.ndim == 4 else array(d[part]) for d in partial]
        _backward(first, last, inputs, rows, tuple(own[:9]), ABSENT[1] if arguments.norm is None else own[9])

    parallel_for(work, tokens)
    return [*d_updates, d_coefficients, *(d_parameter.sum(0) for d_parameter in partial)]


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
def _backward(first: int, last: int, inputs: Any, rows: Any, d_gates: Any, d_norm: Any) -> None:
    updates, coefficients, gates, norm, width, steps, eps, norm_eps, like = inputs
    pre, pre_scale, _, post, post_scale, _, mixing, mixing_scale, _ = gates
    d_output, d_next, d_updates, d_coefficients = rows
    d_pre, d_pre_scale, d_pre_bias, d_post, d_post_scale, d_post_bias, d_mixing, d_mixing_scale, d_mixing_bias = d_gates
    size, count = len(pre), len(updates)
    live, d_live = np.empty((size, width), np.float32), np.empty((size, width), np.float32)
    streams, d_streams = live.reshape(size * width), d_live.reshape(size * width)
    row, gradient = np.empty(width, np.float32), np.empty(width, np.float32)
    projected, de = np.empty((2, size * (size + 2)), np.float32)
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
            d_pre_bias[j] += dz
            d_pre_scale[0] += dz * scale * projected[j]
            de[j] = dz * pre_scale[0] * scale
            d_scale += dz * pre_scale[0] * projected[j]
            dz = d_next[count, j, t] * write_gate[j] * (1 - write_gate[j] / 2)
            d_post_bias[j] += dz
            d_post_scale[0] += dz * scale * projected[size + j]
            de[size + j] = dz * post_scale[0] * scale
            d_scale += dz * post_scale[0] * projected[size + j]
        for g in range(size * size):
            dz = np.float32(d_matrix[g // size, g % size])
            d_mixing_bias[g] += dz
            d_mixing_scale[0] += dz * scale * projected[2 * size + g]
            de[2 * size + g] = dz * mixing_scale[0] * scale
            d_scale += dz * mixing_scale[0] * projected[2 * size + g]
        scaled(d_streams, norm_backward(d_scale, scale, len(streams)), streams)
        add_rows(d_streams, de[:size], pre)
        add_rows(d_streams, de[size : 2 * size], post)
        add_rows(d_streams, de[2 * size :], mixing)
        for j in range(size):
            add(d_live[j], read_gate[j], gradient)
            add_to_two(d_pre[j], d_post[j], de[j], de[size + j], streams)
        d_mixed = de[2 * size :]
        for g in range(0, size * size - 1, 2):
            add_to_two(d_mixing[g], d_mixing[g + 1], d_mixed[g], d_mixed[g + 1], streams)
        if size % 2 == 1:
            add(d_mixing[size * size - 1], d_mixed[size * size - 1], streams)
        for k in range(count):
            load(row, row_of(updates[k], t, width, like))
            for j in range(size):
                d_coefficients[k, j, t] += dot(row, d_live[j])
            row[:] = 0
            for j in range(size):
                add(row, coefficients[k, j, t], d_live[j])
            store(row_of(d_updates[k], t, width, like), row)
