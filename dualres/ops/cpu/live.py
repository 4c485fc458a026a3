"""The live streams of a token, and their write as a state, on a CPU."""
# N tokens  D width  J stored streams  K updates

import math
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from dualres.ops.arguments import WriteArguments
from dualres.ops.cpu.compiler import compiled
from dualres.ops.cpu.launch import address_of, kernel, unpack
from dualres.ops.cpu.loops import loop
from dualres.ops.cpu.rows import by_type, floats, integers, prefetch_row_to_write, row_at

ZERO = np.float32(0)
TERMS = 4  # updates that one loop adds up


@loop
def add_terms(into: Any, before: Any, terms: Any) -> None:
    """into^j = before^j + Σ_n C_n^j u_n; `before` may be empty"""
    for j, row in enumerate(into):
        parts = [weights[j] * update for update, weights in terms]
        row.set(sum(parts[1:], parts[0]) + before[j] if before else sum(parts[1:], parts[0]))


@by_type
def weights_at(coefficients: Any, at: Any, step: Any, rows: Any) -> Any:
    """A coefficient for each of one or two rows."""
    if len(rows) == 1:
        return lambda coefficients, at, step, rows: (coefficients[at],)
    return lambda coefficients, at, step, rows: (coefficients[at], coefficients[at + step])


@compiled
def _term(t: int, k: int, j: int, into: Any, inputs: Any, kind: Any) -> Any:
    """Row t of update k, and its coefficients in stream j and, for two rows, the next."""
    row, at = row_at(integers(inputs.updates)[k], t, inputs.width, kind), (k * inputs.streams + j) * inputs.tokens + t
    return row, weights_at(floats(inputs.coefficients), at, inputs.tokens, into)


@compiled
def sum_updates(t: int, j: int, into: Any, partial: Any, inputs: Any, kind: Any) -> None:
    """P^j = Σ_k C_k^j u_k of token t in stream j and, for two rows, the next; `partial` are as many float32 rows."""
    width, count = inputs.width, inputs.terms
    for k in range(count - TERMS):
        if k == 0:
            add_terms(width, partial, (), (_term(t, k, j, into, inputs, kind),))
        else:
            add_terms(width, partial, partial, (_term(t, k, j, into, inputs, kind),))
    a = _term(t, max(count - 4, 0), j, into, inputs, kind)
    b = _term(t, max(count - 3, 0), j, into, inputs, kind)
    c = _term(t, max(count - 2, 0), j, into, inputs, kind)
    e = _term(t, count - 1, j, into, inputs, kind)
    if count > TERMS:
        add_terms(width, into, partial, (a, b, c, e))
    elif count == 4:
        add_terms(width, into, (), (a, b, c, e))
    elif count == 3:
        add_terms(width, into, (), (b, c, e))
    elif count == 2:
        add_terms(width, into, (), (c, e))
    else:
        add_terms(width, into, (), (e,))


@loop
def update_backward(d_update: Any, before: Any, update: Any, weights: Any, d_live: Any) -> Any:
    """du = before + Σ_j C^j dP^j -> u · dP^j of each stream; `before` and `update` may be empty"""
    parts = [weight * row for weight, row in zip(weights, d_live, strict=True)]
    d_update.set(sum([*parts[1:], *before], parts[0]))
    return tuple(row * update[0] for row in d_live if update)


class WriteInputs(NamedTuple):
    """Of a write or of its backward pass: addresses, 0 for a tensor that is absent, and numbers."""

    updates: list[int]
    coefficients: int
    terms: int  # K
    streams: int
    tokens: int
    width: int
    live: int  # backward, its gradient
    carried: int
    d_updates: list[int]
    d_coefficients: int


def _write_inputs(arguments: WriteArguments, live: Tensor, gradients: WriteArguments | None) -> WriteInputs:
    count, streams, *tokens = arguments.coefficients.shape
    return WriteInputs(
        [update.data_ptr() for update in arguments.updates],
        arguments.coefficients.data_ptr(),
        count,
        streams,
        math.prod(tokens),
        live.shape[-1],
        live.data_ptr(),
        arguments.carried,
        [] if gradients is None else [update.data_ptr() for update in gradients.updates],
        0 if gradients is None else address_of(gradients.coefficients),
    )


def write(arguments: WriteArguments, results: list[Tensor]) -> None:
    inputs = _write_inputs(arguments, results[0], None)
    _write(inputs, inputs.tokens, results[0].dtype, 2 * inputs.width)


@kernel(WriteInputs)
def _write(first: int, last: int, sums: int, scratch: int, table: int, kind: Any) -> None:
    inputs = unpack(table, WriteInputs)
    width, tokens, streams = inputs.width, inputs.tokens, inputs.streams
    partial = floats(scratch), floats(scratch + 4 * width)
    for t in range(first, last):
        for j in range(0, streams - 1, 2):
            row, other = row_at(inputs.live, j * tokens + t, width, kind), (j + 1) * tokens + t
            prefetch_row_to_write(inputs.live, j * tokens + t, width, kind)
            prefetch_row_to_write(inputs.live, other, width, kind)
            sum_updates(t, j, (row, row_at(inputs.live, other, width, kind)), partial, inputs, kind)
        if streams % 2 == 1:
            row = row_at(inputs.live, (streams - 1) * tokens + t, width, kind)
            prefetch_row_to_write(inputs.live, (streams - 1) * tokens + t, width, kind)
            sum_updates(t, streams - 1, (row,), (partial[0],), inputs, kind)


def write_backward(d_live: Tensor, arguments: WriteArguments, gradients: WriteArguments) -> None:
    inputs = _write_inputs(arguments, d_live, gradients)
    _write_backward(inputs, inputs.tokens, d_live.dtype, inputs.width)


@compiled
def _add_streams(width: int, into: Any, before: Any, update: Any, weights: Any, rows: Any, learned: bool) -> Any:
    if learned:
        return update_backward(width, into, before, (update,), weights, rows)
    update_backward(width, into, before, (), weights, rows)
    return ZERO, ZERO


@kernel(WriteInputs)
def _write_backward(first: int, last: int, sums: int, scratch: int, table: int, kind: Any) -> None:
    inputs = unpack(table, WriteInputs)
    width, tokens, streams, fresh = inputs.width, inputs.tokens, inputs.streams, inputs.carried
    coefficients, d_coefficients = floats(inputs.coefficients), floats(inputs.d_coefficients)
    learned, partial = inputs.d_coefficients != 0, floats(scratch)
    for t in range(first, last):
        for k in range(fresh if learned else 0):
            for j in range(streams):
                d_coefficients[(k * streams + j) * tokens + t] = ZERO
        for k in range(fresh, inputs.terms):
            d_update = row_at(integers(inputs.d_updates)[k - fresh], t, width, kind)
            prefetch_row_to_write(integers(inputs.d_updates)[k - fresh], t, width, kind)
            update = row_at(integers(inputs.updates)[k - fresh], t, width, kind) if learned else d_update
            for j in range(0, streams, 2):
                other = min(j + 1, streams - 1)
                at, other_at = (k * streams + j) * tokens + t, (k * streams + other) * tokens + t
                row = row_at(inputs.live, j * tokens + t, width, kind)
                rows = row, row_at(inputs.live, other * tokens + t, width, kind)
                weights = coefficients[at], coefficients[other_at] if other > j else ZERO
                if streams <= 2:
                    found = _add_streams(width, d_update, (), update, weights, rows, learned)
                elif j == 0:
                    found = _add_streams(width, partial, (), update, weights, rows, learned)
                elif j + 2 < streams:
                    found = _add_streams(width, partial, (partial,), update, weights, rows, learned)
                else:
                    found = _add_streams(width, d_update, (partial,), update, weights, rows, learned)
                if learned:
                    d_coefficients[at], d_coefficients[other_at] = found
