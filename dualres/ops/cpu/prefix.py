"""Phase 1 on a CPU: each token's history is read from memory once, forward and backward.

A tile's rows are copied into a buffer: at their own addresses, a power of two apart, they would evict each other from
the caches between the computation of their weights and of their sum.
"""
# N tokens  D width  J stored streams  O output streams  R history  U query sets  M = U·O queries

import functools
from typing import Any, NamedTuple

from numba import types
from torch import Tensor

from dualres.ops.arguments import PrefixArguments, SavedPrefix
from dualres.ops.cpu.compiler import compiled
from dualres.ops.cpu.lanes import (
    LANES,
    exp,
    fma,
    get,
    inverse_rms,
    log,
    number_at,
    put,
    read,
    spread,
    sums,
    where_greater,
    write,
)
from dualres.ops.cpu.launch import kernel, unpack
from dualres.ops.cpu.pointers import LINE, integers, pointer, prefetch, prefetch_to_write, size_of
from dualres.ops.cpu.tiles import copy_rows

TILE_BYTES = 1 << 15  # of the rows of a tile, which should stay in the nearest cache
PAIR = 2 * LANES


class Shape(NamedTuple):
    """What both kernels work on."""

    states: int
    streams: int
    queries: int
    tokens: int
    width: int
    stride: int  # of a row in a buffer
    tile: int  # tokens


def shape_of(history: list[Tensor], queries: Tensor, rows_of_queries: int) -> Shape:
    """The shape, with a tile that fits the caches: per token a row of each stream, and some rows per query."""
    streams, *tokens, width = history[0].shape
    states, count, stride = len(history), queries.shape[0] * queries.shape[1], -(-width // PAIR) * PAIR
    number = 1
    for axis in tokens:
        number *= axis
    fitting = TILE_BYTES // (4 * stride * (states * streams + rows_of_queries * count))
    return Shape(states, streams, count, number, width, stride, max(4, min(LANES, fitting)))


def stream_addresses(tensors: list[Tensor]) -> list[int]:
    """The address of each stream of each tensor. n × (J,…) -> n·J"""
    step = tensors[0].stride(0) * tensors[0].element_size() if tensors else 0
    return [tensor.data_ptr() + j * step for tensor in tensors for j in range(len(tensor))]


@functools.cache
def in_pairs(stream_of_output: tuple[int, ...], streams: int, sets: int) -> list[int]:
    """Queries m, two at a time, that use the same stored stream j; the last of an odd number is there twice.

    A stream that no query uses has −1 in their place. -> j, m, m, j, m, m, …
    """
    numbers = []
    for j in range(streams):
        own = _queries_of(j, stream_of_output, sets) or [-1]
        for n in range(0, len(own), 2):
            numbers += [j, own[n], own[min(n + 1, len(own) - 1)]]
    return numbers


def _queries_of(stream: int, stream_of_output: tuple[int, ...], sets: int) -> list[int]:
    """The queries m of all sets whose output stream uses `stream`."""
    return [m for m in range(sets * len(stream_of_output)) if stream_of_output[m % len(stream_of_output)] == stream]


class Forward(NamedTuple):
    """Addresses, and numbers."""

    shape: list[int]
    history: list[int]  # R·J
    queries: int
    key_pairs: list[int]
    value_pairs: list[int]
    key_pair_count: int
    value_pair_count: int
    retrieved: list[int]  # M
    partition: list[int]  # M
    logits: int
    norms: int
    eps: float


def prefix(arguments: PrefixArguments, results: list[Tensor]) -> None:
    history, queries, key, value, eps = arguments
    shape, sets = shape_of(history, queries, 0), len(queries)
    key_pairs, value_pairs = (in_pairs(tuple(each), shape.streams, sets) for each in (key, value))
    *_, logits, norms = results
    inputs = Forward(
        list(shape),
        stream_addresses(history),
        queries.data_ptr(),
        key_pairs,
        value_pairs,
        len(key_pairs) // 3,
        len(value_pairs) // 3,
        stream_addresses(results[:sets]),
        stream_addresses(results[sets:-2]),
        logits.data_ptr(),
        norms.data_ptr(),
        eps,
    )
    rows = shape.states * shape.streams * shape.tile + shape.queries
    scratch = rows * shape.stride + 3 * LANES * LANES + shape.queries * shape.states * LANES
    _forward(inputs, shape.tokens, history[0].dtype, scratch)


@compiled
def _next_rows(history: Any, r: int, j: int, begin: int, last: int, shape: Any, kind: Any) -> int:
    """The rows that are copied after those of state r, stream j: all states of a stream, then the next stream."""
    r += 1
    if r == shape.states:
        r, j = 0, j + 1
    if j == shape.streams:
        j, begin = 0, min(begin + shape.tile, last)
    return history[r * shape.streams + j] + begin * shape.width * size_of(kind)


@compiled
def _copy_with_dots(
    buffer: int,
    rows: int,
    next_rows: int,
    written: int,
    written_too: int,
    others: int,
    next_others: int,
    next_token: int,
    parts: int,
    tokens: int,
    shape: Any,
    kind: Any,
) -> None:
    """Copy a tile's rows of a stream; their squares and their dot products with two other rows, each in LANES parts.

    The other rows are at two addresses; those of the next token begin `next_token` numbers later. parts (3,LANES,LANES)
    The rows that are copied next are prefetched, and the lines of rows that are written later, at two addresses: those
    of one stream are too few for the hardware to keep up.
    """
    size = size_of(kind)
    for t in range(tokens):
        square = one = two = square_too = one_too = two_too = spread(0.0)
        for d in range(0, shape.width, PAIR):
            for line in range(0, PAIR * size, LINE):
                prefetch(next_rows + d * size + line)
                prefetch_to_write(written + d * size + line)
                prefetch_to_write(written_too + d * size + line)
            x = read(rows + d * size, kind, shape.width - d)
            put(buffer, d, x)
            square = fma(x, x, square)
            one, two = fma(x, get(others, d), one), fma(x, get(next_others, d), two)
            e = d + LANES
            x = read(rows + e * size, kind, shape.width - e)
            put(buffer, e, x)
            square_too = fma(x, x, square_too)
            one_too, two_too = fma(x, get(others, e), one_too), fma(x, get(next_others, e), two_too)
        put(parts, t * LANES, square + square_too)
        put(parts, (LANES + t) * LANES, one + one_too)
        put(parts, (2 * LANES + t) * LANES, two + two_too)
        rows, next_rows, buffer = rows + shape.width * size, next_rows + shape.width * size, buffer + 4 * shape.stride
        others, next_others = others + 4 * next_token, next_others + 4 * next_token
        written, written_too = written + shape.width * size, written_too + shape.width * size


@compiled
def _weighted_sums(
    output: int, other: int, weights: int, others: int, rows: int, tokens: int, shape: Any, kind: Any
) -> None:
    """The retrieved states of two queries with values from one stream. weights (R,LANES), rows (R,tile,stride)"""
    size = size_of(kind)
    for t in range(tokens):
        for d in range(0, shape.width, PAIR):
            one = one_too = two = two_too = spread(0.0)
            at = t * shape.stride + d
            for r in range(shape.states):
                x, y = get(rows, at), get(rows, at + LANES)
                w, v = number_at(weights, r * LANES + t), number_at(others, r * LANES + t)
                one, one_too = fma(w, x, one), fma(w, y, one_too)
                two, two_too = fma(v, x, two), fma(v, y, two_too)
                at += shape.tile * shape.stride
            place, left = (t * shape.width + d) * size, shape.width - d
            write(output + place, kind, left, one)
            write(output + place + LANES * size, kind, left - LANES, one_too)
            if other != output:
                write(other + place, kind, left, two)
                write(other + place + LANES * size, kind, left - LANES, two_too)


@compiled
def shape_at(address: int) -> Any:
    """The shape in a list among the inputs."""
    n = integers(address)
    return Shape(n[0], n[1], n[2], n[3], n[4], n[5], n[6])


@kernel(Forward)
def _forward(first: int, last: int, _: int, scratch: int, table: int, kind: Any) -> None:
    inputs = unpack(table, Forward)
    shape, history = shape_at(inputs.shape), integers(inputs.history)
    states, streams, stride = shape.states, shape.streams, shape.stride
    key_pairs, value_pairs = integers(inputs.key_pairs), integers(inputs.value_pairs)
    retrieved, partition = integers(inputs.retrieved), integers(inputs.partition)
    rows = scratch  # (J,R,tile,stride)
    queries = rows + 4 * streams * states * shape.tile * stride  # (M,stride)
    parts = queries + 4 * shape.queries * stride
    weights = parts + 4 * 3 * LANES * LANES  # (M,R,LANES), first the logits
    copy_rows(queries, 0, inputs.queries, shape.queries, shape.width, stride, types.float32)
    for begin in range(first, last, shape.tile):
        tokens, begun = min(shape.tile, last - begin), begin * shape.width * size_of(kind)
        for n in range(inputs.key_pair_count):
            j, a, b = key_pairs[3 * n], key_pairs[3 * n + 1], key_pairs[3 * n + 2]
            one, two = queries + 4 * max(a, 0) * stride, queries + 4 * max(b, 0) * stride
            for r in range(states):
                buffer, copied = rows + 4 * (j * states + r) * shape.tile * stride, history[r * streams + j] + begun
                ahead = _next_rows(history, r, j, begin, last, shape, kind)
                m = min(2 * (n * states + r), shape.queries - 1)
                written, written_too = retrieved[m] + begun, retrieved[min(m + 1, shape.queries - 1)] + begun
                _copy_with_dots(buffer, copied, ahead, written, written_too, one, two, 0, parts, tokens, shape, kind)
                norm = inverse_rms(sums(parts, 0), shape.width, inputs.eps)
                write(inputs.norms + 4 * ((r * streams + j) * shape.tokens + begin), types.float32, tokens, norm)
                if a >= 0:
                    logit, other = sums(parts, LANES * LANES) * norm, sums(parts, 2 * LANES * LANES) * norm
                    of_state = inputs.logits + 4 * (r * shape.queries * shape.tokens + begin)
                    write(of_state + 4 * a * shape.tokens, types.float32, tokens, logit)
                    write(of_state + 4 * b * shape.tokens, types.float32, tokens, other)
                    put(weights, (a * states + r) * LANES, logit)
                    put(weights, (b * states + r) * LANES, other)
        for m in range(shape.queries):
            own = weights + 4 * m * states * LANES
            highest, mass = get(own, 0), spread(0.0)
            for r in range(1, states):
                logit = get(own, r * LANES)
                highest = where_greater(logit, highest, logit, highest)
            for r in range(states):
                weight = exp(get(own, r * LANES) - highest)
                put(own, r * LANES, weight)
                mass = mass + weight
            write(partition[m] + 4 * begin, types.float32, tokens, highest + log(mass))
            share = spread(1.0) / mass
            for r in range(states):
                put(own, r * LANES, get(own, r * LANES) * share)
        for n in range(inputs.value_pair_count):
            j, a, b = value_pairs[3 * n], value_pairs[3 * n + 1], value_pairs[3 * n + 2]
            if a >= 0:
                one, two = weights + 4 * a * states * LANES, weights + 4 * b * states * LANES
                of_stream = rows + 4 * j * states * shape.tile * stride
                _weighted_sums(retrieved[a] + begun, retrieved[b] + begun, one, two, of_stream, tokens, shape, kind)


class Backward(NamedTuple):
    """Addresses, and numbers."""

    shape: list[int]
    history: list[int]  # R·J
    queries: int
    key: list[int]  # M
    key_pairs: list[int]
    value_pairs: list[int]
    key_pair_count: int
    value_pair_count: int
    terms: list[int]  # J·terms
    term_count: int
    partition: list[int]  # M
    logits: int
    norms: int
    d_retrieved: list[int]  # M
    d_partition: list[int]  # M
    d_carried: list[int]  # R·J
    carried: int  # whether there are any
    d_history: list[int]  # R·J


def prefix_backward(
    d_retrieved: list[Tensor],
    d_partition: list[Tensor],
    d_carried: list[Tensor],
    saved: SavedPrefix,
    gradients: PrefixArguments,
) -> None:
    history, queries, partition, logits, norms, key, value = saved
    shape, sets = shape_of(history, queries, 1), len(queries)
    key_pairs, value_pairs = (in_pairs(tuple(each), shape.streams, sets) for each in (key, value))
    terms = terms_of_states(tuple(key), tuple(value), shape.streams, sets)
    inputs = Backward(
        list(shape),
        stream_addresses(history),
        queries.data_ptr(),
        list(key) * sets,
        key_pairs,
        value_pairs,
        len(key_pairs) // 3,
        len(value_pairs) // 3,
        terms,
        len(terms) // shape.streams,
        stream_addresses(partition),
        logits.data_ptr(),
        norms.data_ptr(),
        stream_addresses(d_retrieved),
        stream_addresses(d_partition),
        stream_addresses(d_carried),
        len(d_carried),
        stream_addresses(gradients.history),
    )
    rows = (shape.states * shape.streams + shape.queries) * shape.tile + shape.queries + 1 + 2
    vectors = 3 * LANES + (2 * shape.queries + 1 + shape.streams) * shape.states
    _backward(inputs, shape.tokens, history[0].dtype, rows * shape.stride + vectors * LANES, [gradients.queries])


@functools.cache
def terms_of_states(key: tuple[int, ...], value: tuple[int, ...], streams: int, sets: int) -> list[int]:
    """The terms of the gradient of stored stream j: m for the gradient of what query m retrieved, M + m for the query.

    Padded to one length with 2·M, a row of zeros. -> J·terms
    """
    count = sets * len(key)
    own = [_queries_of(j, value, sets) + [count + m for m in _queries_of(j, key, sets)] for j in range(streams)]
    longest = max(len(row) for row in own)
    return [term for row in own for term in row + [2 * count] * (longest - len(row))]


@compiled
def _state_gradients(
    d_state: int,
    d_other: int,
    d_carried: int,
    d_carried_too: int,
    shrink: int,
    others_shrink: int,
    row: int,
    others_row: int,
    terms: Any,
    term_count: int,
    bank: int,
    scores: int,
    others_scores: int,
    tokens: int,
    shape: Any,
    kind: Any,
) -> None:
    """The gradients of two states of one stream, from their terms in the bank. scores (2·M+1,R,LANES)"""
    size, tile, stride = size_of(kind), shape.tile, shape.stride
    for t in range(tokens):
        own, own_too = number_at(shrink, t), number_at(others_shrink, t)
        for d in range(0, shape.width, PAIR):
            at = t * stride + d
            one, one_too = own * get(row, at), own * get(row, at + LANES)
            two, two_too = own_too * get(others_row, at), own_too * get(others_row, at + LANES)
            for n in range(term_count):
                m = terms[n]
                at = (m * tile + t if m < shape.queries else shape.queries * (tile - 1) + m) * stride + d
                x, y = get(bank, at), get(bank, at + LANES)
                at = m * shape.states * LANES + t
                w, v = number_at(scores, at), number_at(others_scores, at)
                one, one_too = fma(w, x, one), fma(w, y, one_too)
                two, two_too = fma(v, x, two), fma(v, y, two_too)
            place, left = (t * shape.width + d) * size, shape.width - d
            place_too, rest = place + LANES * size, left - LANES
            if d_carried != 0:
                one = one + read(d_carried + place, kind, left)
                one_too = one_too + read(d_carried + place_too, kind, rest)
                two = two + read(d_carried_too + place, kind, left)
                two_too = two_too + read(d_carried_too + place_too, kind, rest)
            write(d_state + place, kind, left, one)
            write(d_state + place_too, kind, rest, one_too)
            if d_other != d_state:
                write(d_other + place, kind, left, two)
                write(d_other + place_too, kind, rest, two_too)


@compiled
def _query_gradients(
    total: Any, other: Any, sums: int, slopes: int, others: int, rows: int, tokens: int, shape: Any
) -> None:
    """Add the gradients of two queries with keys from one stream over a tile. slopes (R,LANES), rows (R,tile,stride)"""
    for d in range(0, shape.width, PAIR):
        one = one_too = two = two_too = spread(0.0)
        for r in range(shape.states):
            for t in range(tokens):
                at = (r * shape.tile + t) * shape.stride + d
                x, y = get(rows, at), get(rows, at + LANES)
                w, v = number_at(slopes, r * LANES + t), number_at(others, r * LANES + t)
                one, one_too = fma(w, x, one), fma(w, y, one_too)
                two, two_too = fma(v, x, two), fma(v, y, two_too)
        put(sums, d, one)
        put(sums, d + LANES, one_too)
        put(sums, shape.stride + d, two)
        put(sums, shape.stride + d + LANES, two_too)
    found = pointer(sums, types.float32)
    for d in range(shape.width):
        total[d] += found[d]
    if others != slopes:
        for d in range(shape.width):
            other[d] += found[shape.stride + d]


@kernel(Backward)
def _backward(first: int, last: int, totals: int, scratch: int, table: int, kind: Any) -> None:
    inputs = unpack(table, Backward)
    shape, history, d_history = shape_at(inputs.shape), integers(inputs.history), integers(inputs.d_history)
    states, streams, stride, count = shape.states, shape.streams, shape.stride, shape.queries
    key, key_pairs, value_pairs = integers(inputs.key), integers(inputs.key_pairs), integers(inputs.value_pairs)
    partition, d_partition = integers(inputs.partition), integers(inputs.d_partition)
    d_retrieved, d_carried = integers(inputs.d_retrieved), integers(inputs.d_carried)
    rows = scratch  # (J,R,tile,stride)
    # The gradient of a state is a weighted sum of the gradients of the retrieved states, and of the queries: these are
    # the rows of the bank, whose last row is zero, and `scores` has their weights.
    bank = rows + 4 * streams * states * shape.tile * stride
    sums_of_tile = bank + 4 * (count * (shape.tile + 1) + 1) * stride  # (2,stride)
    parts = sums_of_tile + 4 * 2 * stride
    scores = parts + 4 * 3 * LANES * LANES
    shrink = scores + 4 * (2 * count + 1) * states * LANES  # (J,R,LANES), the factor of a state in its own gradient
    slopes = scores + 4 * count * states * LANES  # (M,R,LANES), gradients of the weights, then those of q·v
    copy_rows(bank, count * shape.tile * stride, inputs.queries, count, shape.width, stride, types.float32)
    for d in range(0, stride, LANES):
        put(bank, count * (shape.tile + 1) * stride + d, spread(0.0))
    for r in range(states):
        put(scores, (2 * count * states + r) * LANES, spread(0.0))
    for begin in range(first, last, shape.tile):
        tokens, begun = min(shape.tile, last - begin), begin * shape.width * size_of(kind)
        for m in range(count):
            copy_rows(bank, m * shape.tile * stride, d_retrieved[m] + begun, tokens, shape.width, stride, kind)
        for n in range(inputs.value_pair_count):
            j, a, b = value_pairs[3 * n], value_pairs[3 * n + 1], value_pairs[3 * n + 2]
            one, two = bank + 4 * max(a, 0) * shape.tile * stride, bank + 4 * max(b, 0) * shape.tile * stride
            for r in range(states):
                buffer, copied = rows + 4 * (j * states + r) * shape.tile * stride, history[r * streams + j] + begun
                ahead = _next_rows(history, r, j, begin, last, shape, kind)
                written = d_history[r * streams + j] + begun
                read_later = d_carried[r * streams + j] + begun if inputs.carried else written
                _copy_with_dots(
                    buffer, copied, ahead, written, read_later, one, two, stride, parts, tokens, shape, kind
                )
                if a >= 0:
                    put(slopes, (a * states + r) * LANES, sums(parts, LANES * LANES))
                    put(slopes, (b * states + r) * LANES, sums(parts, 2 * LANES * LANES))
        for n in range(streams * states):
            put(shrink, n * LANES, spread(0.0))
        for m in range(count):
            log_mass = read(partition[m] + 4 * begin, types.float32, tokens)
            d_log_mass = read(d_partition[m] + 4 * begin, types.float32, tokens)
            p, da = scores + 4 * m * states * LANES, slopes + 4 * m * states * LANES
            logits = inputs.logits + 4 * (m * shape.tokens + begin)
            heaviest, reference, delta = spread(-1.0), spread(0.0), spread(0.0)
            for r in range(states):
                weight = exp(read(logits + 4 * r * count * shape.tokens, types.float32, tokens) - log_mass)
                reference = where_greater(weight, heaviest, get(da, r * LANES), reference)
                heaviest = where_greater(weight, heaviest, weight, heaviest)
                put(p, r * LANES, weight)
            for r in range(states):  # da − Σ p da would lose its digits where one weight is nearly 1
                delta = fma(get(p, r * LANES), get(da, r * LANES) - reference, delta)
            for r in range(states):
                norms = inputs.norms + 4 * ((r * streams + key[m]) * shape.tokens + begin)
                norm = read(norms, types.float32, tokens)
                logit = read(logits + 4 * r * count * shape.tokens, types.float32, tokens)
                slope = get(p, r * LANES) * (get(da, r * LANES) - reference - delta + d_log_mass) * norm
                put(da, r * LANES, slope)
                own = (key[m] * states + r) * LANES
                put(shrink, own, get(shrink, own) - slope * norm * logit / shape.width)
        for j in range(streams):
            for r in range(0, states, 2):
                other = min(r + 1, states - 1)
                _state_gradients(
                    d_history[r * streams + j] + begun,
                    d_history[other * streams + j] + begun,
                    d_carried[r * streams + j] + begun if inputs.carried else 0,
                    d_carried[other * streams + j] + begun if inputs.carried else 0,
                    shrink + 4 * (j * states + r) * LANES,
                    shrink + 4 * (j * states + other) * LANES,
                    rows + 4 * (j * states + r) * shape.tile * stride,
                    rows + 4 * (j * states + other) * shape.tile * stride,
                    integers(inputs.terms + 8 * j * inputs.term_count),
                    inputs.term_count,
                    bank,
                    scores + 4 * r * LANES,
                    scores + 4 * other * LANES,
                    tokens,
                    shape,
                    kind,
                )
        for n in range(inputs.key_pair_count):
            j, a, b = key_pairs[3 * n], key_pairs[3 * n + 1], key_pairs[3 * n + 2]
            if a >= 0:
                one, two = slopes + 4 * a * states * LANES, slopes + 4 * b * states * LANES
                total = pointer(totals + 8 * a * shape.width, types.float64)
                other_total = pointer(totals + 8 * b * shape.width, types.float64)
                of_stream = rows + 4 * j * states * shape.tile * stride
                _query_gradients(total, other_total, sums_of_tile, one, two, of_stream, tokens, shape)
