"""Phase 1 on a GPU: one pass over the history for every query of a block, and its gradient.

Each program keeps one token's accumulators of all queries in registers, so each state is loaded once. Where sets ×
outputs × padded width is more than `REGISTERS`, groups of query sets run one after the other, each with its own pass.
"""
# N tokens  D width  J stored streams  O output streams  R history  U query sets
# ruff: noqa: N803, N806
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, assignment"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualres.ops.triton.common import added, columns, launch, parameter, pick, pointers, rows, stream_rows, zeros

REGISTERS = 16384  # float32 accumulators that 16 warps hold beside the rows they work on


def prefix(history: list[Tensor], queries: Tensor, key: list[int], value: list[int], eps: float) -> list[Tensor]:
    """`autograd.prefix`."""
    state, (sets, outputs, width) = history[0], queries.shape
    streams, *shape = state.shape[:-1]
    tokens = math.prod(shape)
    retrieved = [state.new_empty(outputs, *shape, width) for _ in range(sets)]
    partition = [queries.new_empty(outputs, *shape) for _ in range(sets)]
    logits = queries.new_empty(len(history), sets, outputs, *shape)
    norms = queries.new_empty(len(history), streams, *shape)
    group = group_size(sets, outputs, width)
    tile = rows(width, group * outputs)
    for first in range(0, sets, group):
        chosen = slice(first, first + group)
        launch(
            _prefix,
            tile.grid(tokens),
            pointers(history),
            queries[chosen],
            tuple(retrieved[chosen]),
            tuple(partition[chosen]),
            logits[:, chosen],
            norms,
            tokens,
            len(history),
            sets * outputs,
            eps,
            KEY=tuple(key),
            VALUE=tuple(value),
            SETS=group,
            STREAMS=streams,
            D=width,
            TOKENS=tile.tokens,
            WIDTH=tile.width,
            warps=tile.warps,
        )
    return [*retrieved, *partition, logits, norms]


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
    """`autograd.prefix_backward`: one pass over the history for d h̃ · v, token-wise algebra, one for the gradients."""
    sets, outputs, width = queries.shape
    streams, tokens = len(history[0]), norms[0, 0].numel()
    products = torch.empty_like(logits)  # (R,U,O,B,T)
    group = group_size(sets, outputs, width)
    tile = rows(width, group * outputs)
    for first in range(0, sets, group):
        chosen = slice(first, first + group)
        launch(
            _products,
            tile.grid(tokens),
            pointers(history),
            tuple(d_retrieved[chosen]),
            products[:, chosen],
            tokens,
            len(history),
            sets * outputs,
            VALUE=tuple(value),
            SETS=group,
            STREAMS=streams,
            D=width,
            TOKENS=tile.tokens,
            WIDTH=tile.width,
            warps=tile.warps,
        )
    weights, d_scores, shrinks = _softmax_backward(products, d_partition, partition, logits, norms, key, width)
    d_history = [torch.empty_like(state) for state in history]
    cut = columns(tokens, width, 2 * sets * outputs)
    partial = queries.new_empty(cut.grid[1], *queries.shape)  # (chunks,U,O,D)
    launch(
        _prefix_backward,
        cut.grid,
        pointers(history),
        pointers(d_history),
        tuple(d_retrieved),
        queries,
        weights,
        d_scores,
        shrinks,
        partial,
        tokens,
        len(history),
        cut.chunk,
        KEY=tuple(key),
        VALUE=tuple(value),
        SETS=sets,
        STREAMS=streams,
        D=width,
        TOKENS=cut.tokens,
        WIDTH=cut.width,
        warps=cut.warps,
    )
    return [*d_history, partial.sum(0)]


def _softmax_backward(
    products: Tensor,
    d_partition: list[Tensor],
    partition: list[Tensor],
    logits: Tensor,
    norms: Tensor,
    key: list[int],
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """p, da · rstd, and how much of each stream its norm takes back, Σ da · a · rstd² / D: one number per token each.

    da = p (dp − Σ_r p_r dp_r + dζ). The sum is over the products: a rounded h̃ would bring its rounding into dq. They
    are counted from that of the largest weight: dp − Σ p dp would lose its digits where one weight is nearly 1.
    """
    weights = torch.exp(logits - torch.stack(partition))  # (R,U,O,B,T)
    products = products - products.gather(0, logits.argmax(0, keepdim=True))
    d_logits = weights * (products - (weights * products).sum(0) + torch.stack(d_partition))
    d_scores = d_logits * norms[:, key].unsqueeze(1)
    shrinks = torch.zeros_like(norms)  # (R,J,B,T)
    for taken, k in zip((d_scores * logits).sum(1).unbind(1), key, strict=True):
        shrinks[:, k] += taken * norms[:, k] / width
    return weights, d_scores, shrinks


def group_size(sets: int, outputs: int, width: int) -> int:
    """How many query sets one program serves: the most that divide `sets` and fit."""
    fitting = REGISTERS // (outputs * triton.next_power_of_2(width))
    return max(size for size in range(1, sets + 1) if sets % size == 0 and size <= max(1, fitting))


@triton.jit(do_not_specialize=["tokens", "states", "pairs"])
def _prefix(
    history,
    queries,
    retrieved,
    partition,
    logits,
    norms,
    tokens: tl.int64,
    states,
    pairs,  # U·O of all query sets, of which this launch may serve some
    eps,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SETS: tl.constexpr,
    STREAMS: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """ã = (q·v) · rstd(v); h̃ = Σ_r softmax_r(ã) v_r by the online softmax."""
    OUTPUTS: tl.constexpr = len(KEY)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, WIDTH)
    present = token < tokens
    mask = present[:, None] & (column < D)[None, :]
    at = token[:, None] * D + column[None, :]
    sums = zeros(SETS * OUTPUTS, TOKENS, WIDTH)
    largest, mass = (), ()
    for _ in tl.static_range(SETS * OUTPUTS):
        largest = largest + (tl.full([TOKENS], float("-inf"), tl.float32),)
        mass = mass + (tl.zeros([TOKENS], tl.float32),)
    ahead = stream_rows(history[0], tokens, at, mask, D, STREAMS)
    for r in range(0, states):
        now = ahead  # the next state is on its way while this one is worked on
        ahead = stream_rows(pick(history, r + 1), tokens, at, mask & (r + 1 < states), D, STREAMS)
        streams, scales = (), ()
        for j in tl.static_range(STREAMS):
            stream = now[j].to(tl.float32)
            scale = tl.rsqrt(tl.sum(stream * stream, 1) / D + eps)
            tl.store(norms + (r * STREAMS + j) * tokens + token, scale, present)
            streams, scales = streams + (stream,), scales + (scale,)
        new_sums, new_largest, new_mass = (), (), ()
        for n in tl.static_range(SETS * OUTPUTS):
            query = parameter(queries + n * D, column, D)
            logit = tl.sum(streams[KEY[n % OUTPUTS]] * query, 1) * scales[KEY[n % OUTPUTS]]
            tl.store(logits + (r * pairs + n) * tokens + token, logit, present)
            top = tl.maximum(largest[n], logit)
            kept, weight = tl.exp(largest[n] - top), tl.exp(logit - top)
            new_sums = new_sums + (sums[n] * kept[:, None] + streams[VALUE[n % OUTPUTS]] * weight[:, None],)
            new_largest, new_mass = new_largest + (top,), new_mass + (mass[n] * kept + weight,)
        sums, largest, mass = new_sums, new_largest, new_mass
    for n in tl.static_range(SETS * OUTPUTS):
        found = retrieved[n // OUTPUTS] + (n % OUTPUTS) * tokens * D + at
        tl.store(found, (sums[n] / mass[n][:, None]).to(found.dtype.element_ty), mask)
        zeta = largest[n] + tl.log(mass[n])
        tl.store(partition[n // OUTPUTS] + (n % OUTPUTS) * tokens + token, zeta, present)


@triton.jit(do_not_specialize=["tokens", "states", "pairs"])
def _products(
    history,
    d_retrieved,
    products,
    tokens: tl.int64,
    states,
    pairs,
    VALUE: tl.constexpr,
    SETS: tl.constexpr,
    STREAMS: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """dp_r = d h̃ · v_r."""
    OUTPUTS: tl.constexpr = len(VALUE)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, WIDTH)
    present = token < tokens
    mask = present[:, None] & (column < D)[None, :]
    at = token[:, None] * D + column[None, :]
    gradients = ()
    for u in tl.static_range(SETS):
        gradients = gradients + stream_rows(d_retrieved[u], tokens, at, mask, D, OUTPUTS)
    ahead = stream_rows(history[0], tokens, at, mask, D, STREAMS)
    for r in range(0, states):
        now = ahead
        ahead = stream_rows(pick(history, r + 1), tokens, at, mask & (r + 1 < states), D, STREAMS)
        for n in tl.static_range(SETS * OUTPUTS):
            product = tl.sum(gradients[n].to(tl.float32) * now[VALUE[n % OUTPUTS]].to(tl.float32), 1)
            tl.store(products + (r * pairs + n) * tokens + token, product, present)


@triton.jit(do_not_specialize=["tokens", "states", "chunk"])
def _prefix_backward(
    history,
    d_history,
    d_retrieved,
    queries,
    weights,
    d_scores,
    shrinks,
    partial,
    tokens: tl.int64,
    states,
    chunk,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SETS: tl.constexpr,
    STREAMS: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """dv = Σ p dh̃ + Σ (da rstd) q − shrink · v, and the chunk's share of dq = Σ (da rstd) v."""
    OUTPUTS: tl.constexpr = len(KEY)
    PAIRS: tl.constexpr = SETS * OUTPUTS
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    first = tl.program_id(1).to(tl.int64) * chunk
    d_queries = zeros(PAIRS, TOKENS, WIDTH)
    for start in range(first, tl.minimum(first + chunk, tokens), TOKENS):
        token = start + tl.arange(0, TOKENS)
        present = token < tokens
        mask = present[:, None] & (column < D)[None, :]
        at = token[:, None] * D + column[None, :]
        gradients = ()
        for u in tl.static_range(SETS):
            gradients = gradients + stream_rows(d_retrieved[u], tokens, at, mask, D, OUTPUTS)
        for r in range(0, states):
            d_state = pick(d_history, r)
            streams = stream_rows(pick(history, r), tokens, at, mask, D, STREAMS)
            scored, terms = (), ()
            for n in tl.static_range(PAIRS):
                d_score = tl.load(d_scores + (r * PAIRS + n) * tokens + token, present, other=0.0)[:, None]
                scored = scored + (d_score,)
                terms = terms + (d_score * streams[KEY[n % OUTPUTS]].to(tl.float32),)
            d_queries = added(d_queries, terms)
            for j in tl.static_range(STREAMS):
                shrink = tl.load(shrinks + (r * STREAMS + j) * tokens + token, present, other=0.0)[:, None]
                d_stream = -shrink * streams[j].to(tl.float32)
                for n in tl.static_range(PAIRS):
                    if KEY[n % OUTPUTS] == j:
                        d_stream += scored[n] * parameter(queries + n * D, column, D)
                    if VALUE[n % OUTPUTS] == j:
                        weight = tl.load(weights + (r * PAIRS + n) * tokens + token, present, other=0.0)[:, None]
                        d_stream += weight * gradients[n].to(tl.float32)
                tl.store(d_state + j * tokens * D + at, d_stream.to(d_state.dtype.element_ty), mask)
    for n in tl.static_range(PAIRS):
        place = partial + (tl.program_id(1).to(tl.int64) * PAIRS + n) * D + column
        tl.store(place, tl.sum(d_queries[n], 0), column < D)
