"""Kernels that take a tile of tokens at a time: their vectors, and tokens that do not disturb each other."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit, types
from torch import Tensor

from dualres import ops
from dualres.ops import GateParameters, Live, Norm, Prefix, Route, reference
from dualres.ops.cpu import lanes
from dualres.ops.cpu.lanes import LANES
from dualres.residual import route
from dualres.residual.live import appended, plus
from tests.small import relative_error

EPS = 1e-6
compiled: Any = njit  # not kept on disk, where numba would not see that `lanes` has changed


@compiled
def exps(x, into, count):
    for n in range(0, count, LANES):
        lanes.put(into, n, lanes.exp(lanes.get(x, n)))


@compiled
def logs(x, into, count):
    for n in range(0, count, LANES):
        lanes.put(into, n, lanes.log(lanes.get(x, n)))


def applied(function: Any, numbers: Any) -> Any:
    """What a function of vectors makes of float32 numbers, whose count is a multiple of LANES."""
    found = np.empty_like(numbers)
    function(numbers.ctypes.data, found.ctypes.data, len(numbers))
    return found


def test_exponentials():
    numbers = np.linspace(-87, 88, 1000 * LANES).astype(np.float32)
    wanted = np.exp(numbers.astype(np.float64))
    assert np.max(np.abs(applied(exps, numbers) / wanted - 1)) < 1.2e-7
    edges = np.array([-math.inf, -1000, 1000, math.nan, 0.0, *[0.0] * (LANES - 5)], np.float32)
    low, lower, high, bad, one, *_ = applied(exps, edges)
    assert 0 < low == lower < 2e-38
    assert 1e38 < high < math.inf
    assert math.isnan(bad)
    assert one == 1


def test_logarithms():
    numbers = np.exp(np.linspace(-20, 20, 1000 * LANES)).astype(np.float32)
    wanted = np.log(numbers.astype(np.float64))
    assert np.max(np.abs(applied(logs, numbers) - wanted) / np.maximum(np.abs(wanted), 0.1)) < 1.2e-7
    one, bad, infinite, *_ = applied(logs, np.array([1.0, math.nan, math.inf, *[1.0] * (LANES - 3)], np.float32))
    assert one == 0
    assert math.isnan(bad)
    assert not math.isfinite(infinite)


@compiled
def sum_rows(rows, into, left):
    lanes.put(into, 0, lanes.sums(rows, 0))
    return lanes.total(lanes.get(rows, 0), left)


def test_sums():
    rows = np.random.default_rng(0).integers(-99, 99, (LANES, LANES)).astype(np.float32)
    found = np.empty(LANES, np.float32)
    for left in (-1, 0, 1, 5, LANES, LANES + 3):
        assert sum_rows(rows.ctypes.data, found.ctypes.data, left) == rows[0, : max(left, 0)].sum()
    assert np.array_equal(found, rows.sum(1))


@compiled
def products(a, b, into):
    block = lanes.get_block(into, 0, 4 * LANES, LANES)
    block = lanes.add_products(block, lanes.four_numbers_at(a, 0, 2), lanes.get_four(b, 0, LANES))
    lanes.put_block(into, 0, 4 * LANES, LANES, block)


def test_blocks():
    draw = np.random.default_rng(0)
    a, b, into = (draw.integers(-99, 99, shape).astype(np.float32) for shape in ((4, 2), (4, LANES), (4, 4, LANES)))
    wanted = into + a[:, :1, None] * b
    products(a.ctypes.data, b.ctypes.data, into.ctypes.data)
    assert np.array_equal(into, wanted)


@compiled
def double(row, into, kind, left):
    x = lanes.read(row, kind, left)
    lanes.write(into, kind, left, x + x)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.float32, types.float32), (torch.bfloat16, types.uint16), (torch.float16, types.int16)],
    ids=str,
)
def test_a_row_may_end_within_a_vector(dtype: torch.dtype, kind: Any):
    for left in (-3, 0, 1, 7, LANES - 1, LANES, LANES + 1):
        row, into, whole = torch.randn(LANES).to(dtype), torch.zeros(LANES, dtype=dtype), min(max(left, 0), LANES)
        double(row.data_ptr(), into.data_ptr(), kind, left)
        assert torch.equal(into[:whole], 2 * row[:whole])
        assert not into[whole:].any()


Streams = list[Tensor]


def prefixed(draw: Callable[..., Tensor], tokens: int) -> tuple[Streams, Callable[..., Streams]]:
    queries = draw(2, 2, 24)

    def call(*history: Tensor) -> Streams:
        found = ops.prefix(history, queries, route=route.DUAL, eps=EPS)
        return [tensor for each in found for tensor in (each.retrieved, each.log_partition.unsqueeze(-1))]

    return [draw(2, 1, tokens, 24) for _ in range(3)], call


def hyper(draw: Callable[..., Tensor], tokens: int, below: float = 0.0) -> tuple[Streams, Callable[..., Streams]]:
    """With the logits of the last row of H_res so far below the others."""
    gates = [GateParameters(draw(n, 4, 24) / 10, torch.ones(1), draw(n)) for n in (4, 4, 16)]
    gates[2].bias[-4:] -= below
    norm = Norm(draw(24), EPS)

    def call(coefficients: Tensor, *updates: Tensor, of: Any = ops) -> Streams:
        rows = tuple(update.squeeze(0) for update in updates)
        own = [GateParameters(*(x.to(coefficients.dtype) for x in gate)) for gate in gates]
        weight = Norm(norm.weight.to(coefficients.dtype), norm.eps)
        read, after = of.hyper_read(Live(rows, coefficients.squeeze(-1)), gates=own, steps=20, eps=EPS, norm=weight)
        return [read.unsqueeze(0), after.coefficients.unsqueeze(-1)]

    return [draw(3, 4, 1, tokens, 1), *(draw(1, 1, tokens, 24) for _ in range(3))], call


WIDE = 300  # a tile has fewer than LANES tokens


def plain(
    draw: Callable[..., Tensor], tokens: int, rule: Route = route.SINGLE
) -> tuple[Streams, Callable[..., Streams]]:
    """Three reads, each with the carriers of the one before."""
    count, query, norm = 1 + max(*rule.key, *rule.value), draw(1, WIDE) / 9, Norm(draw(WIDE), EPS)

    def call(partition: Tensor, retrieved: Tensor, *updates: Tensor) -> Streams:
        prefix, live, found = Prefix(retrieved, partition.squeeze(-1)), None, []
        for n in range(0, len(updates), count):
            read, prefix, live = ops.read(prefix, live, query=query, route=rule, eps=EPS, norm=norm)
            live = plus(live, tuple(update.squeeze(0) for update in updates[n : n + count]))
            found.append(read.unsqueeze(0))
        return found

    return [draw(1, 1, tokens, 1), *(draw(1, 1, tokens, WIDE) for _ in range(1 + 3 * count))], call


def value_projected(draw: Callable[..., Tensor], tokens: int) -> tuple[Streams, Callable[..., Streams]]:
    return plain(draw, tokens, route.VALUE_PROJECTED)


def gated(draw: Callable[..., Tensor], tokens: int) -> tuple[Streams, Callable[..., Streams]]:
    """Three reads, each with the carriers of the one before."""
    gates = [GateParameters(draw(n, 2, WIDE) / 10, torch.ones(1), draw(n)) for n in (2, 2, 1)]
    query, norm = draw(2, WIDE) / 9, Norm(draw(WIDE), EPS)

    def call(partition: Tensor, retrieved: Tensor, *updates: Tensor) -> Streams:
        prefix, live, found = Prefix(retrieved, partition.squeeze(-1)), None, []
        for update in updates:
            own: Any = {"query": query, "gates": gates if live else gates[:2], "norm": norm}
            read, prefix, live = ops.gated_read(prefix, live, route=route.DUAL, eps=EPS, **own)
            found += [read.unsqueeze(0), live.coefficients.unsqueeze(-1)]
            live = appended(live, update.squeeze(0))
        return found

    return [draw(2, 1, tokens, 1), draw(2, 1, tokens, WIDE), *(draw(1, 1, tokens, WIDE) for _ in range(3))], call


def written(draw: Callable[..., Tensor], tokens: int) -> tuple[Streams, Callable[..., Streams]]:
    def call(coefficients: Tensor, *updates: Tensor) -> Streams:
        return [ops.write(Live(tuple(update.squeeze(0) for update in updates), coefficients.squeeze(-1)))]

    return [draw(3, 5, 1, tokens, 1), *(draw(1, 1, tokens, 24) for _ in range(3))], call


def gradients(streams: Streams, call: Callable[..., Streams]) -> Streams:
    """The results, and the gradients of the streams."""
    leaves = [stream.clone().requires_grad_() for stream in streams]
    results = call(*leaves)
    found = torch.autograd.grad(results, leaves, [x.detach().square() for x in results], allow_unused=True)
    return [*results, *(gradient for gradient in found if gradient is not None)]


def random(*shape: int) -> Tensor:
    return torch.randn(shape)


def hyper_in_float64(draw: Callable[..., Tensor], tokens: int) -> tuple[Streams, Callable[..., Streams]]:
    """For some of the tokens."""
    return hyper(draw, tokens, below=49.0)


KERNELS = [prefixed, plain, value_projected, gated, hyper, written]


@pytest.mark.parametrize("make", [*KERNELS, hyper_in_float64])
def test_results_do_not_depend_on_the_place_in_a_tile(make: Any):
    """Nor on how many tokens there are, or threads: tokens are on the axis before the last."""
    torch.manual_seed(0)
    streams, call = make(random, 75)
    whole = gradients(streams, call)
    for first, last in [(0, 1), (0, 16), (3, 20), (40, 75), (74, 75)]:
        part = gradients([stream[..., first:last, :].contiguous() for stream in streams], call)
        for own, wanted in zip(part, whole, strict=True):
            assert torch.equal(own, wanted[..., first:last, :])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("make", KERNELS)
def test_a_number_that_is_not_finite_stays_with_its_token(make: Any, bad: float):
    torch.manual_seed(0)
    streams, call = make(random, 21)
    wanted = gradients(streams, call)
    streams[1][0, 0, 5, 3] = bad
    others = [t for t in range(21) if t != 5]
    for found, right in zip(gradients(streams, call), wanted, strict=True):
        assert torch.equal(found[..., others, :], right[..., others, :])
        assert not torch.isfinite(found[..., 5, :]).all()


@pytest.mark.parametrize("below", [0.0, 45.0, 50.0, 100.0, 300.0, 900.0])
def test_sinkhorn_of_logits_far_apart(below: float):
    """In float32, in float64 where numbers of float32 would vanish, and in log space where those of float64 would."""
    torch.manual_seed(0)
    streams, call = hyper(random, 40, below)
    found = gradients(streams, call)
    wanted = gradients([stream.double() for stream in streams], lambda *given: call(*given, of=reference))
    for ours, right in zip(found, wanted, strict=True):
        assert relative_error(ours, right) < 1e-5
