"""Phase 2 on a CPU: live streams, merge, gates, branch input and norm of a token while its rows are in the cache."""
# N tokens  D width  J stored streams  O output streams  K updates

import math
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from dualres.ops.inputs import ReadInputs
from dualres.ops.native.rows import add, dot, inverse_rms, normalise, normalise_backward, scaled
from dualres.ops.native.streams import LIKE, OPTIONS, array, begins, load, row_of, store, streams_of
from dualres.ops.native.threads import parts, share

ABSENT = {size: np.empty((0,) * size, np.float32) for size in (1, 2, 3)}


def read(given: ReadInputs) -> tuple[Tensor, Tensor]:
    """See `dualres.ops.fused.read`."""
    partition = given.partition
    h = torch.empty_like(given.retrieved[0])
    left = partition.new_empty(len(given.updates) + 1, *partition.shape) if given.gates else partition.new_empty(0)
    inputs, after = _arrays(given), array(left.flatten(2)) if given.gates else ABSENT[3]
    share(lambda part, first, last: _forward(first, last, inputs, h.data_ptr(), after), partition[0].numel())
    return h, left


def _arrays(given: ReadInputs) -> tuple[Any, ...]:
    """The inputs as compiled code takes them; what is absent is an array of no elements."""
    return (
        streams_of([given.retrieved])[0],
        array(given.partition.flatten(1)),
        begins(given.updates),
        ABSENT[3] if given.coefficients is None else array(given.coefficients.flatten(2)),
        ABSENT[2] if given.queries is None else array(given.queries),
        np.array(given.key),
        np.array(given.value),
        _three([array(gate) for gate in given.gates]),
        ABSENT[1] if given.norm is None else array(given.norm),
        given.retrieved.shape[-1],
        given.eps,
        given.norm_eps,
        LIKE[given.retrieved.dtype],
    )


def _three(gates: list[Any]) -> tuple[Any, ...]:
    """Weight, scale and bias of three gates, of which some may be absent."""
    return (*gates, *[ABSENT[size] for size in (3, 1, 1)] * (3 - len(gates) // 3))


@njit(**OPTIONS)
def live_streams(live: Any, updates: Any, coefficients: Any, t: int, row: Any, like: Any) -> None:
    """P^j = Σ_k C_k^j u_k of token t. (J,D), (K,), (K,J,N)"""
    live[:] = 0
    for k in range(len(updates)):
        load(row, row_of(updates[k], t, len(row), like))
        for j in range(len(live)):
            add(live[j], coefficients[k, j, t], row)


@njit(**OPTIONS)
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^−x)"""
    return np.float32(1 / (1 + math.exp(-x)))


@njit(**OPTIONS)
def project(streams: Any, weight: Any) -> Any:
    """Σ_j x^j · W^j, one gate value before its norm, scale and bias. (J,D), (J,D) -> 1"""
    total = np.float32(0)
    for j in range(len(streams)):
        total += dot(streams[j], weight[j])
    return total


@njit(**OPTIONS)
def _merge(
    t: int,
    retrieved: Any,
    partition: Any,
    live: Any,
    queries: Any,
    key: Any,
    value: Any,
    eps: float,
    like: Any,
    h: Any,
    scores: Any,
    norms: Any,
    masses: Any,
) -> None:
    """h^o = λ h̃^o + (1 − λ) P^value; keeps what λ was made of: q·Norm(P), the inverse norms, λ itself."""
    for o in range(len(h)):
        load(h[o], row_of(retrieved[o], t, h.shape[1], like))
        if len(queries) > 0:
            scored = live[key[o] : key[o] + 1]
            norms[o] = inverse_rms(scored, eps)
            scores[o] = dot(queries[o], scored[0]) * norms[o]
            masses[o] = sigmoid(partition[o, t] - scores[o])
            own, returned, mass = h[o], live[value[o]], masses[o]
            for d in range(len(own)):
                own[d] = mass * own[d] + (1 - mass) * returned[d]


@njit(**OPTIONS)
def _forward(first: int, last: int, inputs: Any, output: int, left: Any) -> None:
    retrieved, partition, updates, coefficients, queries, key, value, gates, norm, width, eps, norm_eps, like = inputs
    alpha, alpha_scale, alpha_bias, beta, beta_scale, beta_bias, rho, rho_scale, rho_bias = gates
    outputs, streams = len(retrieved), coefficients.shape[1]
    live, h = np.empty((streams, width), np.float32), np.empty((outputs, width), np.float32)
    row, mixed = np.empty(width, np.float32), np.empty((1, width), np.float32)
    scores, norms, masses = np.empty((3, outputs), np.float32)
    for t in range(first, last):
        if len(updates) > 0:
            live_streams(live, updates, coefficients, t, row, like)
        _merge(t, retrieved, partition, live, queries, key, value, eps, like, h, scores, norms, masses)
        result = h[0]
        if len(alpha) > 0:
            scale = inverse_rms(h, eps)
            result = mixed[0]
            result[:] = 0
            for o in range(outputs):
                gate = sigmoid(alpha_scale[0] * scale * project(h, alpha[o]) + alpha_bias[o])
                add(result, gate, h[o])
                left[len(updates), o, t] = 2 * sigmoid(beta_scale[0] * scale * project(h, beta[o]) + beta_bias[o])
        if len(rho) > 0:
            keep = sigmoid(rho_scale[0] * inverse_rms(live, eps) * project(live, rho[0]) + rho_bias[0])
            for k in range(len(updates)):
                for j in range(2):
                    left[k, j, t] = keep * coefficients[k, j, t] + (1 - keep) * coefficients[k, 1 - j, t]
        if len(norm) > 0:
            normalise(result, norm, norm_eps)
        store(row_of(output, t, width, like), result)


def read_backward(d_h: Tensor, d_left: Tensor, given: ReadInputs) -> list[Tensor]:
    """See `dualres.ops.fused.read_backward`."""
    tokens, inputs = given.partition[0].numel(), _arrays(given)
    d_retrieved, d_updates = torch.empty_like(given.retrieved), [torch.empty_like(update) for update in given.updates]
    d_partition = torch.empty_like(given.partition)
    learned = given.coefficients if given.gates else None
    d_coefficients = None if learned is None else torch.empty_like(learned)
    present = [parameter for parameter in (given.queries, *given.gates, given.norm) if parameter is not None]
    partial = [parameter.new_zeros(parts(tokens), *parameter.shape) for parameter in present]
    rows = (
        d_h.data_ptr(),
        array(d_left.flatten(2)) if given.gates else ABSENT[3],
        streams_of([d_retrieved])[0],
        array(d_partition.flatten(1)),
        begins(d_updates),
        ABSENT[3] if d_coefficients is None else array(d_coefficients.flatten(2)),
    )

    def work(part: int, first: int, last: int) -> None:
        own = iter([array(d_parameter[part]) for d_parameter in partial])
        d_queries = ABSENT[2] if given.queries is None else next(own)
        d_gates = _three([next(own) for _ in given.gates])
        _backward(first, last, inputs, rows, d_queries, d_gates, ABSENT[1] if given.norm is None else next(own))

    share(work, tokens)
    live = [d_partition, *d_updates] if given.updates else []
    if d_coefficients is not None:
        live.append(d_coefficients)
    return [d_retrieved, *live, *(d_parameter.sum(0) for d_parameter in partial)]


@njit(**OPTIONS)
def gate_backward(
    dz: Any, scale: Any, norm: Any, projected: Any, streams: Any, weight: Any, d_streams: Any, d_weight: Any
) -> Any:
    """Of z = scale · norm · e + bias with e = Σ_j x^j·W^j: adds to the streams' and the weight's gradient.

    -> the gradient of the scale, and of the norm
    """
    de = dz * scale * norm
    for j in range(len(streams)):
        add(d_streams[j], de, weight[j])
        add(d_weight[j], de, streams[j])
    return dz * norm * projected, dz * scale * projected


@njit(**OPTIONS)
def norm_backward(d_norm: Any, norm: Any, streams: Any, d_streams: Any) -> None:
    """Of norm = 1 / √(mean x² + eps), over all streams together."""
    factor = -d_norm * norm * norm * norm / streams.size
    for j in range(len(streams)):
        add(d_streams[j], factor, streams[j])


@njit(**OPTIONS)
def _backward(first: int, last: int, inputs: Any, rows: Any, d_queries: Any, d_gates: Any, d_norm: Any) -> None:
    retrieved, partition, updates, coefficients, queries, key, value, gates, norm, width, eps, norm_eps, like = inputs
    alpha, alpha_scale, alpha_bias, beta, beta_scale, beta_bias, rho, rho_scale, rho_bias = gates
    d_output, d_left, d_retrieved, d_partition, d_updates, d_coefficients = rows
    d_alpha, d_alpha_scale, d_alpha_bias, d_beta, d_beta_scale, d_beta_bias, d_rho, d_rho_scale, d_rho_bias = d_gates
    outputs, streams, count = len(retrieved), coefficients.shape[1], len(updates)
    live, d_live = np.empty((streams, width), np.float32), np.empty((streams, width), np.float32)
    h, d_h = np.empty((outputs, width), np.float32), np.empty((outputs, width), np.float32)
    row, given, mixed = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    scores, norms, masses = np.empty((3, outputs), np.float32)
    opened, written, e_alpha, e_beta = np.empty((4, outputs), np.float32)  # α, β and their projections
    for t in range(first, last):
        if count > 0:
            live_streams(live, updates, coefficients, t, row, like)
        _merge(t, retrieved, partition, live, queries, key, value, eps, like, h, scores, norms, masses)
        d_live[:] = 0
        load(given, row_of(d_output, t, width, like))
        gated = len(alpha) > 0
        scale = np.float32(0)
        if gated:
            scale = inverse_rms(h, eps)
            mixed[:] = 0
            for o in range(outputs):
                e_alpha[o], e_beta[o] = project(h, alpha[o]), project(h, beta[o])
                opened[o] = sigmoid(alpha_scale[0] * scale * e_alpha[o] + alpha_bias[o])
                written[o] = 2 * sigmoid(beta_scale[0] * scale * e_beta[o] + beta_bias[o])
                add(mixed, opened[o], h[o])
        else:
            store(mixed, h[0])
        if len(norm) > 0:
            normalise_backward(given, mixed, norm, norm_eps, d_norm)
        if gated:
            d_scale = np.float32(0)
            for o in range(outputs):
                scaled(d_h[o], opened[o], given)
            for o in range(outputs):
                dz = dot(given, h[o]) * opened[o] * (1 - opened[o])
                ds, dm = gate_backward(dz, alpha_scale[0], scale, e_alpha[o], h, alpha[o], d_h, d_alpha[o])
                d_alpha_scale[0] += ds
                d_alpha_bias[o] += dz
                d_scale += dm
                dz = d_left[count, o, t] * written[o] * (1 - written[o] / 2)
                ds, dm = gate_backward(dz, beta_scale[0], scale, e_beta[o], h, beta[o], d_h, d_beta[o])
                d_beta_scale[0] += ds
                d_beta_bias[o] += dz
                d_scale += dm
            norm_backward(d_scale, scale, h, d_h)
        else:
            store(d_h[0], given)
        for o in range(outputs):
            mass = np.float32(1)
            if count > 0:
                mass, own = masses[o], d_h[o]
                returned, d_returned = live[value[o]], d_live[value[o]]
                load(row, row_of(retrieved[o], t, width, like))
                d_score = (dot(own, returned) - dot(own, row)) * mass * (1 - mass)
                d_partition[o, t] = -d_score
                add(d_returned, 1 - mass, own)
                add(d_live[key[o]], d_score * norms[o], queries[o])
                add(d_queries[o], d_score * norms[o], live[key[o]])
                add(d_live[key[o]], -d_score * scores[o] * norms[o] * norms[o] / width, live[key[o]])
            scaled(row, mass, d_h[o])
            store(row_of(d_retrieved[o], t, width, like), row)
        keep = np.float32(1)
        if len(rho) > 0:
            whole, projected = inverse_rms(live, eps), project(live, rho[0])
            keep = sigmoid(rho_scale[0] * whole * projected + rho_bias[0])
            d_keep = np.float32(0)
            for k in range(count):
                own, other = coefficients[k, 0, t], coefficients[k, 1, t]
                d_keep += (d_left[k, 0, t] - d_left[k, 1, t]) * (own - other)
            dz = d_keep * keep * (1 - keep)
            ds, dm = gate_backward(dz, rho_scale[0], whole, projected, live, rho[0], d_live, d_rho[0])
            d_rho_scale[0] += ds
            d_rho_bias[0] += dz
            norm_backward(dm, whole, live, d_live)
        for k in range(count):
            if len(d_coefficients) > 0:
                load(row, row_of(updates[k], t, width, like))
                for j in range(streams):
                    carried = keep * d_left[k, j, t] + (1 - keep) * d_left[k, 1 - j, t]
                    d_coefficients[k, j, t] = carried + dot(row, d_live[j])
            row[:] = 0
            for j in range(streams):
                add(row, coefficients[k, j, t], d_live[j])
            store(row_of(d_updates[k], t, width, like), row)
