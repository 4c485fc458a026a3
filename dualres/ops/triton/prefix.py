"""Phase 1 on a GPU: one pass over the history for every query of a block, and its gradient.

Each program keeps one token's accumulators of all queries in registers, so each state is loaded once. If sets ×
outputs × padded width exceeds `REGISTERS`, groups of query sets run one after the other, each with its own pass.
"""
# N tokens  D width  J stored streams  O output streams  R history  U query sets
# ruff: noqa: N803, N806
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, assignment"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualres.ops.arguments import PrefixArguments, SavedPrefix
from dualres.ops.triton import tiles
from dualres.ops.triton.launch import columns, launch, pointers, route, rows

REGISTERS = 16384  # float32 accumulators that 16 warps hold besides the rows they work on


class Softmax(NamedTuple):
    """What the gradients of the history and the queries need of the softmax over depth."""

    weights: Tensor  # p (R,U,O,B,T)
    d_scores: Tensor  # da · rstd (R,U,O,B,T)
    shrinks: Tensor  # each stream's factor in its gradient through its norm, Σ da · a · rstd² / D (R,J,B,T)


def prefix(arguments: PrefixArguments, results: list[Tensor]) -> None:
    history, queries, _, _, eps = arguments
    sets, outputs, width = queries.shape
    *_, logits, norms = results
    tokens, group = norms[0, 0].numel(), group_size(sets, outputs, width)
    tiling = rows(tokens, width, group * outputs, len(history[0]))
    for first in range(0, sets, group):
        chosen = slice(first, first + group)
        own = (tuple(results[:sets][chosen]), tuple(results[sets:-2][chosen]), logits[:, chosen], norms)
        numbers = (tokens, len(history), sets * outputs, eps)
        launch(_prefix, tiling, pointers(history), queries[chosen], own, *numbers, **route(arguments))


def prefix_backward(
    d_retrieved: list[Tensor],
    d_partition: list[Tensor],
    d_carried: list[Tensor],
    saved: SavedPrefix,
    gradients: PrefixArguments,
) -> None:
    """`autograd.prefix.backward`: one pass over the history for d h̃ · v, token-wise algebra, one for the gradients.

    A history of one state has weight 1, whatever the products.
    """
    sets, outputs, width = saved.queries.shape
    states, streams, tokens = len(saved.history), len(saved.history[0]), saved.norms[0, 0].numel()
    history, products = pointers(saved.history), torch.zeros_like(saved.logits)  # (R,U,O,B,T)
    group = group_size(sets, outputs, width)
    tiling = rows(tokens, width, group * outputs, streams)
    for first in range(0, sets if states > 1 else 0, group):
        own = (tuple(d_retrieved[first : first + group]), products[:, first : first + group])
        launch(_products, tiling, history, *own, tokens, states, sets * outputs, VALUE=tuple(saved.value))
    softmax = _softmax_backward(products, d_partition, saved, width)
    tiling = columns(tokens, width, 2 * sets * outputs, streams)
    partial = saved.queries.new_empty(tiling.grid[1], *saved.queries.shape)  # (chunks,U,O,D)
    inputs = (history, saved.queries, tuple(d_retrieved), pointers(d_carried), softmax)
    results = (pointers(gradients.history), partial)
    launch(_prefix_backward, tiling, inputs, results, tokens, states, tiling.chunk, **route(saved))
    torch.sum(partial, 0, out=gradients.queries)


def _softmax_backward(products: Tensor, d_partition: list[Tensor], saved: SavedPrefix, width: int) -> Softmax:
    """da = p (dp − Σ_r p_r dp_r + dζ). The sum is over the products: h̃ would bring its rounding error into dq. The
    product of the largest weight is subtracted first: dp − Σ p dp would lose its digits where one weight is nearly 1.
    """
    logits, norms, key = saved.logits, saved.norms, saved.key
    weights = torch.exp(logits - torch.stack(saved.log_partition))  # (R,U,O,B,T)
    products = products - products.gather(0, logits.argmax(0, keepdim=True))
    d_logits = weights * (products - (weights * products).sum(0) + torch.stack(d_partition))
    d_scores = d_logits * norms[:, key].unsqueeze(1)
    shrinks = torch.zeros_like(norms)  # (R,J,B,T)
    for shrink, k in zip((d_scores * logits).sum(1).unbind(1), key, strict=True):
        shrinks[:, k] += shrink * norms[:, k] / width
    return Softmax(weights, d_scores, shrinks)


def group_size(sets: int, outputs: int, width: int) -> int:
    """The number of query sets per program: the largest divisor of `sets` that fits."""
    fitting = REGISTERS // (outputs * triton.next_power_of_2(width))
    return max(size for size in range(1, sets + 1) if sets % size == 0 and size <= max(1, fitting))


@triton.jit
def _load_sets(retrieved, tile, OUTPUTS: tl.constexpr):
    """The rows of every query set and output stream, as stored."""
    rows_of_sets = ()
    for u in tl.static_range(len(retrieved)):
        rows_of_sets = rows_of_sets + tiles.load_streams(retrieved[u], tile, OUTPUTS)
    return rows_of_sets


@triton.jit(do_not_specialize=["tokens", "states", "pairs"])
def _prefix(
    history,
    queries,
    results,
    tokens: tl.int64,
    states,
    pairs,  # U·O of all query sets, of which this launch may compute only some
    eps,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """ã = (q·v) · rstd(v); h̃ = Σ_r softmax_r(ã) v_r by the online softmax."""
    retrieved, partition, logits, norms = results
    OUTPUTS: tl.constexpr = len(KEY)
    PAIRS: tl.constexpr = len(retrieved) * OUTPUTS
    tile = tiles.rows_of_program(tokens, SHAPE)
    sums = tiles.zeros(PAIRS, (SHAPE.TOKENS, SHAPE.WIDTH))
    largest, mass = (), tiles.zeros(PAIRS, (SHAPE.TOKENS,))
    for _ in tl.static_range(PAIRS):
        largest = largest + (tl.full([SHAPE.TOKENS], float("-inf"), tl.float32),)
    ahead = tiles.load_streams(history[0], tile, SHAPE.STREAMS)
    for r in range(0, states):
        now = ahead  # the next state is loaded while this one is processed
        ahead = tiles.load_streams(tiles.pick(history, r + 1), tile, SHAPE.STREAMS, r + 1 < states)
        streams, scales = (), ()
        for j in tl.static_range(SHAPE.STREAMS):
            stream = now[j].to(tl.float32)
            scale = tiles.inverse_rms(tl.sum(stream * stream, 1), eps, SHAPE.D)
            tiles.store_number(norms, r * SHAPE.STREAMS + j, tile, scale)
            streams, scales = streams + (stream,), scales + (scale,)
        new_sums, new_largest, new_mass = (), (), ()
        for n in tl.static_range(PAIRS):
            query = tiles.parameter(queries + n * SHAPE.D, tile)
            logit = tl.sum(streams[KEY[n % OUTPUTS]] * query, 1) * scales[KEY[n % OUTPUTS]]
            tiles.store_number(logits, r * pairs + n, tile, logit)
            top = tl.maximum(largest[n], logit)
            kept, weight = tl.exp(largest[n] - top), tl.exp(logit - top)
            new_sums = new_sums + (sums[n] * kept[:, None] + streams[VALUE[n % OUTPUTS]] * weight[:, None],)
            new_largest, new_mass = new_largest + (top,), new_mass + (mass[n] * kept + weight,)
        sums, largest, mass = new_sums, new_largest, new_mass
    for n in tl.static_range(PAIRS):
        tiles.store_row(retrieved[n // OUTPUTS] + (n % OUTPUTS) * tokens * SHAPE.D, tile, sums[n] / mass[n][:, None])
        tiles.store_number(partition[n // OUTPUTS], n % OUTPUTS, tile, largest[n] + tl.log(mass[n]))


@triton.jit(do_not_specialize=["tokens", "states", "pairs"])
def _products(
    history, d_retrieved, products, tokens: tl.int64, states, pairs, VALUE: tl.constexpr, SHAPE: tl.constexpr
):
    """dp_r = d h̃ · v_r."""
    tile = tiles.rows_of_program(tokens, SHAPE)
    gradients = _load_sets(d_retrieved, tile, len(VALUE))
    ahead = tiles.load_streams(history[0], tile, SHAPE.STREAMS)
    for r in range(0, states):
        now = ahead  # the next state is loaded while this one is processed
        ahead = tiles.load_streams(tiles.pick(history, r + 1), tile, SHAPE.STREAMS, r + 1 < states)
        for n in tl.static_range(len(gradients)):
            product = tl.sum(gradients[n].to(tl.float32) * now[VALUE[n % len(VALUE)]].to(tl.float32), 1)
            tiles.store_number(products, r * pairs + n, tile, product)


@triton.jit(do_not_specialize=["tokens", "states", "chunk"])
def _prefix_backward(
    inputs, results, tokens: tl.int64, states, chunk, KEY: tl.constexpr, VALUE: tl.constexpr, SHAPE: tl.constexpr
):
    """dv = Σ p dh̃ + Σ (da rstd) q − shrink · v + what later readers send back, and the chunk's part of
    dq = Σ (da rstd) v."""
    history, queries, d_retrieved, d_carried, softmax = inputs
    d_history, partial = results
    OUTPUTS: tl.constexpr = len(KEY)
    PAIRS: tl.constexpr = len(d_retrieved) * OUTPUTS
    column = tl.program_id(0) * SHAPE.WIDTH + tl.arange(0, SHAPE.WIDTH)
    first = tl.program_id(1).to(tl.int64) * chunk
    d_queries = tiles.zeros(PAIRS, (SHAPE.TOKENS, SHAPE.WIDTH))
    for start in range(first, tl.minimum(first + chunk, tokens), SHAPE.TOKENS):
        tile = tiles.tile_at(start + tl.arange(0, SHAPE.TOKENS), column, tokens, SHAPE.D)
        gradients = _load_sets(d_retrieved, tile, OUTPUTS)
        for r in range(0, states):
            d_state = tiles.pick(d_history, r)
            streams = tiles.load_streams(tiles.pick(history, r), tile, SHAPE.STREAMS)
            scored, terms = (), ()
            for n in tl.static_range(PAIRS):
                d_score = tiles.load_number(softmax.d_scores, r * PAIRS + n, tile)[:, None]
                scored = scored + (d_score,)
                terms = terms + (d_score * streams[KEY[n % OUTPUTS]].to(tl.float32),)
            d_queries = tiles.added(d_queries, terms)
            for j in tl.static_range(SHAPE.STREAMS):
                shrink = tiles.load_number(softmax.shrinks, r * SHAPE.STREAMS + j, tile)[:, None]
                d_stream = -shrink * streams[j].to(tl.float32)
                for n in tl.static_range(PAIRS):
                    if KEY[n % OUTPUTS] == j:
                        d_stream += scored[n] * tiles.parameter(queries + n * SHAPE.D, tile)
                    if VALUE[n % OUTPUTS] == j:
                        weight = tiles.load_number(softmax.weights, r * PAIRS + n, tile)[:, None]
                        d_stream += weight * gradients[n].to(tl.float32)
                if len(d_carried) > 0:
                    d_stream += tiles.load_row(tiles.pick(d_carried, r) + j * tokens * SHAPE.D, tile)
                tiles.store_row(d_state + j * tokens * SHAPE.D, tile, d_stream)
    tiles.store_sums(partial, d_queries, column, SHAPE.D)
