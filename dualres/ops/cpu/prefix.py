"""Phase 1 on a CPU: each token's history is read from memory once, forward and backward.

Its rows are copied into one buffer: at their own addresses, a power of two apart, they would evict each other from
the cache between the computation of their weights and of their sum.
"""
# N tokens  D width  J stored streams  O output streams  R history  U query sets  M = U·O queries

import functools
import math
from typing import Any

import numpy as np
from torch import Tensor

from dualres.ops.arguments import PrefixArguments, SavedPrefix
from dualres.ops.cpu.compiler import compiled
from dualres.ops.cpu.launch import LIKE, Array, array, parallel_for, parallel_sums, stream_addresses, tokenwise
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


def prefix(arguments: PrefixArguments, results: list[Tensor]) -> None:
    history, queries, key, value, eps = arguments
    state, sets = history[0], len(queries)
    *_, logits, norms = results
    inputs = (
        stream_addresses(history),
        array(queries.flatten(0, 1)),
        by_stream(tuple(key), len(state), sets),
        np.array(value * sets),
        in_pairs(tuple(value), sets),
        eps,
        LIKE[state.dtype],
    )
    outputs = (
        stream_addresses(results[:sets]).ravel(),
        stream_addresses(results[sets:-2]).ravel(),
        tokenwise(logits.flatten(1, 2), 2),
        tokenwise(norms, 2),
    )
    parallel_for(lambda part, first, last: _forward(first, last, inputs, outputs), norms[0, 0].numel())


@functools.cache
def by_stream(stream_of_output: tuple[int, ...], streams: int, sets: int) -> Array:
    """The queries m whose output stream uses stored stream j, padded with −1. -> (J,M+2)"""
    own = [_queries_of(j, stream_of_output, sets) for j in range(streams)]
    return np.array([row + [-1] * (sets * len(stream_of_output) + 2 - len(row)) for row in own])


@functools.cache
def in_pairs(stream_of_output: tuple[int, ...], sets: int) -> Array:
    """Pairs of queries m that use the same stored stream; −1 completes the last pair of an odd number. -> (·,2)"""
    pairs = []
    for stream in sorted(set(stream_of_output)):
        own = _queries_of(stream, stream_of_output, sets)
        pairs += [own[n : n + 2] if n + 1 < len(own) else [own[n], -1] for n in range(0, len(own), 2)]
    return np.array(pairs)


def _queries_of(stream: int, stream_of_output: tuple[int, ...], sets: int) -> list[int]:
    """The queries m of all sets whose output stream uses `stream`."""
    return [m for m in range(sets * len(stream_of_output)) if stream_of_output[m % len(stream_of_output)] == stream]


@compiled
def _forward(first: int, last: int, inputs: Any, results: Any) -> None:
    history, queries, queries_by_key, value, pairs, eps, like = inputs
    retrieved, partition, logits, norms = results
    states, query_count, _ = logits.shape
    streams, width = norms.shape[1], queries.shape[1]
    rows, totals = np.empty((streams, states, width), np.float32), np.empty((2, width), np.float32)
    single = np.empty(0, np.float32)
    weights = np.empty((query_count, states), np.float32)  # first the logits
    for t in range(first, last):
        for r in range(states):
            for j in range(streams):
                row = rows[j, r]
                a, b = max(queries_by_key[j, 0], 0), max(queries_by_key[j, 0], queries_by_key[j, 1], 0)
                read = row_of(history[r, j], t, width, like)
                square, one, two = load_with_dots(row, read, queries[a], queries[b])
                prefetch_row(history[r, j], min(t + 1, last - 1), width, like, 0, 2)
                norm = np.float32(1 / math.sqrt(square / width + eps))
                norms[r, j, t] = norm
                n = 0
                while queries_by_key[j, n] >= 0:
                    weights[a, r], weights[b, r] = one * norm, two * norm
                    logits[r, a, t], logits[r, b, t] = weights[a, r], weights[b, r]
                    n += 2 if b > a else 1
                    if queries_by_key[j, n] >= 0:
                        a, b = queries_by_key[j, n], max(queries_by_key[j, n], queries_by_key[j, n + 1])
                        one, two = two_dots(queries[a], queries[b], row)
        for m in range(query_count):
            highest = weights[m, 0]
            for r in range(1, states):
                highest = max(highest, weights[m, r])
            mass = np.float32(0)
            for r in range(states):
                weights[m, r] = math.exp(weights[m, r] - highest)
                mass += weights[m, r]
                for j in range(streams):
                    prefetch_row(history[r, j], min(t + 1, last - 1), width, like, query_count + m, 2 * query_count)
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
    d_retrieved: list[Tensor], d_partition: list[Tensor], saved: SavedPrefix, gradients: PrefixArguments
) -> None:
    history, queries, partition, logits, norms, key, value = saved
    state, sets = history[0], len(queries)
    inputs = (
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
        stream_addresses(gradients.history),
        LIKE[state.dtype],
    )

    def work(first: int, last: int, own: list[Any]) -> None:
        _backward(first, last, inputs, array(own[0].flatten(0, 1)))

    parallel_sums(work, norms[0, 0].numel(), [gradients.queries])


@functools.cache
def terms_of_states(key: tuple[int, ...], value: tuple[int, ...], streams: int, sets: int) -> Array:
    """The rows of the bank in the gradient of stored stream j, padded to fours with the zero row. -> (J,·)"""
    query_count = sets * len(key)
    own = [_queries_of(j, value, sets) + [query_count + m for m in _queries_of(j, key, sets)] for j in range(streams)]
    longest = -(-max(len(row) for row in own) // 4) * 4
    return np.array([row + [2 * query_count] * (longest - len(row)) for row in own])


@compiled
def _backward(first: int, last: int, arguments: Any, d_queries: Any) -> None:
    d_retrieved, d_partition, history, queries, partition, logits, norms = arguments[:7]
    key, pairs, queries_by_value, terms, d_history, like = arguments[7:]
    states, query_count, _ = logits.shape
    streams, width = norms.shape[1], queries.shape[1]
    rows, totals = np.empty((streams, states, width), np.float32), np.empty((2, width), np.float32)
    single = np.empty(0, np.float32)
    # The gradient of a state is a weighted sum of the gradients of the retrieved states, and of the queries: these are
    # the rows of the bank, whose last row is zero, and `scores` has their weights.
    size = 2 * query_count + 1
    bank, scores = np.zeros((size, width), np.float32), np.zeros((size, states), np.float32)
    p = scores[:query_count]  # the weights of the softmax
    scored = scores[query_count : 2 * query_count]  # first the logits, then their gradients times the norms
    da = np.empty((query_count, states), np.float32)  # gradients of the weights, then of the logits
    shrink = np.empty((streams, states), np.float32)  # the factor of a state in its own gradient, through its norm
    weights = np.empty((2, terms.shape[1]), np.float32)
    for m in range(query_count):
        load(bank[query_count + m], queries[m])
    for t in range(first, last):
        for m in range(query_count):
            load(bank[m], row_of(d_retrieved[m], t, width, like))
            log_mass = row_of(partition[m], t, 1, single)[0]
            for r in range(states):
                scored[m, r] = logits[r, m, t]
                p[m, r] = math.exp(scored[m, r] - log_mass)
        for r in range(states):
            for j in range(streams):
                row = rows[j, r]
                a, b = max(queries_by_value[j, 0], 0), max(queries_by_value[j, 0], queries_by_value[j, 1], 0)
                read = row_of(history[r, j], t, width, like)
                _, one, two = load_with_dots(row, read, bank[a], bank[b])
                prefetch_row(history[r, j], min(t + 1, last - 1), width, like, 0, 2)
                n = 0
                while queries_by_value[j, n] >= 0:
                    da[a, r], da[b, r] = one, two
                    n += 2 if b > a else 1
                    if queries_by_value[j, n] >= 0:
                        a, b = queries_by_value[j, n], max(queries_by_value[j, n], queries_by_value[j, n + 1])
                        one, two = two_dots(bank[a], bank[b], row)
        shrink[:] = 0
        for m in range(query_count):
            heaviest = 0
            for r in range(1, states):
                heaviest = r if p[m, r] > p[m, heaviest] else heaviest
            reference, delta = da[m, heaviest], np.float32(0)
            for r in range(states):
                da[m, r] -= reference  # da − Σ p da would lose its digits where one weight is nearly 1
                delta += p[m, r] * da[m, r]
            d_log_mass = row_of(d_partition[m], t, 1, single)[0]
            for r in range(states):
                da[m, r] = p[m, r] * (da[m, r] - delta + d_log_mass)
                norm, logit = norms[r, key[m], t], scored[m, r]
                scored[m, r] = da[m, r] * norm
                shrink[key[m], r] -= scored[m, r] * norm * logit / width
                for j in range(streams):
                    prefetch_row(history[r, j], min(t + 1, last - 1), width, like, query_count + m, 2 * query_count)
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
