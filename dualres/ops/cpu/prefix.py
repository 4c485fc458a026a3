"""Phase 1 on a CPU: a token reads its history from memory once, forward and backward.

Its rows are copied side by side: where they lie, a power of two apart, they would drive each other out of the cache
between the search for their weights and their sum.
"""
# N tokens  D width  J stored streams  O output streams  R history  U query sets  M = U·O queries

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualres.ops.cpu.compiler import compiled
from dualres.ops.cpu.launch import LIKE, Array, array, parts, share, stream_addresses, tokenwise
from dualres.ops.cpu.rows import (
    add_rows,
    add_rows_to_two,
    finish,
    load,
    load_with_dots,
    prefetch_row,
    row_of,
    sum_chosen,
    sum_chosen_for_two,
    target,
    two_dots,
)


def prefix(history: list[Tensor], queries: Tensor, key: list[int], value: list[int], eps: float) -> list[Tensor]:
    """See `dualres.ops.autograd.prefix`."""
    state, (sets, outputs, _) = history[0], queries.shape
    tokens = state[0, ..., 0].numel()
    retrieved = [state.new_empty(outputs, *state.shape[1:]) for _ in range(sets)]
    partition = [queries.new_empty(outputs, *state.shape[1:-1]) for _ in range(sets)]
    logits = queries.new_empty(len(history), sets, outputs, *state.shape[1:-1])
    norms = queries.new_empty(len(history), *state.shape[:-1])
    inputs = (
        stream_addresses(history),
        array(queries.flatten(0, 1)),
        by_stream(tuple(key), len(state), sets),
        np.array(value * sets),
        in_pairs(tuple(value), sets),
        eps,
        LIKE[state.dtype],
    )
    results = (
        stream_addresses(retrieved).ravel(),
        stream_addresses(partition).ravel(),
        tokenwise(logits.flatten(1, 2), 2),
        tokenwise(norms, 2),
    )
    share(lambda part, first, last: _forward(first, last, inputs, results), tokens)
    return [*retrieved, *partition, logits, norms]


@functools.cache
def by_stream(chosen: tuple[int, ...], streams: int, sets: int) -> Array:
    """The queries m whose output stream has chosen stored stream j; −1 fills the rows. -> (J,M+2)"""
    own = [_queries_of(j, chosen, sets) for j in range(streams)]
    return np.array([row + [-1] * (sets * len(chosen) + 2 - len(row)) for row in own])


@functools.cache
def in_pairs(chosen: tuple[int, ...], sets: int) -> Array:
    """The queries m two by two that have chosen the same stored stream; −1 beside one that is left over. -> (·,2)"""
    pairs = []
    for stream in sorted(set(chosen)):
        own = _queries_of(stream, chosen, sets)
        pairs += [own[n : n + 2] if n + 1 < len(own) else [own[n], -1] for n in range(0, len(own), 2)]
    return np.array(pairs)


def _queries_of(stream: int, chosen: tuple[int, ...], sets: int) -> list[int]:
    """The queries m of all sets whose output stream has chosen that stored stream."""
    return [m for m in range(sets * len(chosen)) if chosen[m % len(chosen)] == stream]


@compiled
def _forward(first: int, last: int, inputs: Any, results: Any) -> None:
    history, queries, scoring, value, pairs, eps, like = inputs
    retrieved, partition, logits, norms = results
    states, asked, _ = logits.shape
    streams, width = norms.shape[1], queries.shape[1]
    rows, totals = np.empty((streams, states, width), np.float32), np.empty((2, width), np.float32)
    single = np.empty(0, np.float32)
    weights = np.empty((asked, states), np.float32)  # first the logits
    for t in range(first, last):
        for r in range(states):
            for j in range(streams):
                row = rows[j, r]
                a, b = max(scoring[j, 0], 0), max(scoring[j, 0], scoring[j, 1], 0)
                read = row_of(history[r, j], t, width, like)
                square, one, two = load_with_dots(row, read, queries[a], queries[b])
                prefetch_row(history[r, j], min(t + 1, last - 1), width, like, 0, 2)
                norm = np.float32(1 / math.sqrt(square / width + eps))
                norms[r, j, t] = norm
                n = 0
                while scoring[j, n] >= 0:
                    weights[a, r], weights[b, r] = one * norm, two * norm
                    logits[r, a, t], logits[r, b, t] = weights[a, r], weights[b, r]
                    n += 2 if b > a else 1
                    if scoring[j, n] >= 0:
                        a, b = scoring[j, n], max(scoring[j, n], scoring[j, n + 1])
                        one, two = two_dots(queries[a], queries[b], row)
        for m in range(asked):
            highest = weights[m, 0]
            for r in range(1, states):
                highest = max(highest, weights[m, r])
            mass = np.float32(0)
            for r in range(states):
                weights[m, r] = math.exp(weights[m, r] - highest)
                mass += weights[m, r]
                for j in range(streams):
                    prefetch_row(history[r, j], min(t + 1, last - 1), width, like, asked + m, 2 * asked)
            for r in range(states):
                weights[m, r] /= mass
            row_of(partition[m], t, 1, single)[0] = highest + math.log(mass)
        for m, other in pairs:
            row = row_of(retrieved[m], t, width, like)
            sums = target(row, totals[0])
            sums[:] = 0
            if other < 0:
                add_rows(sums, weights[m], rows[value[m]])
            else:
                row_too = row_of(retrieved[other], t, width, like)
                sums_too = target(row_too, totals[1])
                sums_too[:] = 0
                add_rows_to_two(sums, sums_too, weights[m], weights[other], rows[value[m]])
                finish(row_too, sums_too)
            finish(row, sums)


def prefix_backward(
    d_retrieved: list[Tensor],
    d_partition: list[Tensor],
    history: list[Tensor],
    queries: Tensor,
    partition: list[Tensor],
    logits: Tensor,
    norms: Tensor,
    key: list[int],
    value: list[int],
) -> list[Tensor]:
    """See `dualres.ops.autograd.prefix_backward`."""
    state, (sets, _, _) = history[0], queries.shape
    tokens = state[0, ..., 0].numel()
    d_history = [torch.empty_like(state) for state in history]
    d_queries = queries.new_zeros(parts(tokens), *queries.shape)
    partial = array(d_queries.flatten(1, 2))
    arguments = (
        stream_addresses(d_retrieved).ravel(),
        stream_addresses(d_partition).ravel(),
        stream_addresses(history),
        array(queries.flatten(0, 1)),
        stream_addresses(partition).ravel(),
        tokenwise(logits.flatten(1, 2), 2),
        tokenwise(norms, 2),
        np.array(key * sets),
        in_pairs(tuple(key), sets),
        by_stream(tuple(value), len(state), sets),
        terms_of_states(tuple(key), tuple(value), len(state), sets),
        stream_addresses(d_history),
        LIKE[state.dtype],
    )
    share(lambda part, first, last: _backward(first, last, arguments, partial[part]), tokens)
    return [*d_history, d_queries.sum(0)]


@functools.cache
def terms_of_states(key: tuple[int, ...], value: tuple[int, ...], streams: int, sets: int) -> Array:
    """The rows of the bank that make the gradient of stored stream j, filled to fours with the zero row. -> (J,·)"""
    asked = sets * len(key)
    own = [_queries_of(j, value, sets) + [asked + m for m in _queries_of(j, key, sets)] for j in range(streams)]
    longest = -(-max(len(row) for row in own) // 4) * 4
    return np.array([row + [2 * asked] * (longest - len(row)) for row in own])


@compiled
def _backward(first: int, last: int, arguments: Any, d_queries: Any) -> None:
    d_retrieved, d_partition, history, queries, partition, logits, norms = arguments[:7]
    key, pairs, returning, terms, d_history, like = arguments[7:]
    states, asked, _ = logits.shape
    streams, width = norms.shape[1], queries.shape[1]
    rows, totals = np.empty((streams, states, width), np.float32), np.empty((2, width), np.float32)
    single = np.empty(0, np.float32)
    # The gradient of a state is a sum of gradients of what was retrieved, and of queries: rows of the bank, the last of
    # them zero, with a row of `scores` each.
    bank, scores = np.zeros((2 * asked + 1, width), np.float32), np.zeros((2 * asked + 1, states), np.float32)
    p = scores[:asked]  # the weights of the softmax
    scored = scores[asked : 2 * asked]  # first the logits, then their gradients times the norms
    da = np.empty((asked, states), np.float32)  # gradients of the weights, then of the logits
    shrink = np.empty((streams, states), np.float32)  # what the norms take from a state, times itself
    weights = np.empty((2, terms.shape[1]), np.float32)
    for m in range(asked):
        load(bank[asked + m], queries[m])
    for t in range(first, last):
        for m in range(asked):
            load(bank[m], row_of(d_retrieved[m], t, width, like))
            log_mass = row_of(partition[m], t, 1, single)[0]
            for r in range(states):
                scored[m, r] = logits[r, m, t]
                p[m, r] = math.exp(scored[m, r] - log_mass)
        for r in range(states):
            for j in range(streams):
                row = rows[j, r]
                a, b = max(returning[j, 0], 0), max(returning[j, 0], returning[j, 1], 0)
                read = row_of(history[r, j], t, width, like)
                _, one, two = load_with_dots(row, read, bank[a], bank[b])
                prefetch_row(history[r, j], min(t + 1, last - 1), width, like, 0, 2)
                n = 0
                while returning[j, n] >= 0:
                    da[a, r], da[b, r] = one, two
                    n += 2 if b > a else 1
                    if returning[j, n] >= 0:
                        a, b = returning[j, n], max(returning[j, n], returning[j, n + 1])
                        one, two = two_dots(bank[a], bank[b], row)
        shrink[:] = 0
        for m in range(asked):
            heaviest = 0
            for r in range(1, states):
                heaviest = r if p[m, r] > p[m, heaviest] else heaviest
            most, delta = da[m, heaviest], np.float32(0)
            for r in range(states):
                da[m, r] -= most  # da − Σ p da would lose its digits where one weight is nearly 1
                delta += p[m, r] * da[m, r]
            given = row_of(d_partition[m], t, 1, single)[0]
            for r in range(states):
                da[m, r] = p[m, r] * (da[m, r] - delta + given)
                norm, logit = norms[r, key[m], t], scored[m, r]
                scored[m, r] = da[m, r] * norm
                shrink[key[m], r] -= scored[m, r] * norm * logit / width
                for j in range(streams):
                    prefetch_row(history[r, j], min(t + 1, last - 1), width, like, asked + m, 2 * asked)
        for j in range(streams):
            for r in range(0, states, 2):
                for n in range(len(terms[j])):
                    weights[0, n] = scores[terms[j, n], r]
                    weights[1, n] = scores[terms[j, n], min(r + 1, states - 1)]
                row = row_of(d_history[r, j], t, width, like)
                sums = target(row, totals[0])
                if r + 1 == states:
                    sum_chosen(sums, shrink[j, r], rows[j, r], weights[0], bank, terms[j])
                else:
                    row_too = row_of(d_history[r + 1, j], t, width, like)
                    sums_too = target(row_too, totals[1])
                    two, own = (rows[j, r], rows[j, r + 1]), shrink[j, r : r + 2]
                    sum_chosen_for_two((sums, sums_too), own, two, weights, bank, terms[j])
                    finish(row_too, sums_too)
                finish(row, sums)
        for m, other in pairs:
            if other < 0:
                add_rows(d_queries[m], scored[m], rows[key[m]])
            else:
                add_rows_to_two(d_queries[m], d_queries[other], scored[m], scored[other], rows[key[m]])
