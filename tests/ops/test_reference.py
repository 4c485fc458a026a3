"""The reference operators: gradients, the two-phase identity, and the invariants that the paper states."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from dualres import ops
from dualres.ops import reference
from dualres.residual import route
from tests.small import relative_error

ROUTES = {
    "single": (route.SINGLE, 1),
    "vproj": (route.VALUE_PROJECTED, 2),
    "dual": (route.DUAL, 2),
    "self_kv": (route.SELF_KV, 2),
    "fixed_kv": (route.FIXED_KV, 2),
    "cross_v": (route.CROSS_V, 2),
}
EPS = 1e-6


def random(*shape: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_()


def states(count: int, streams: int, shape: tuple[int, int, int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [random(streams, *shape, dtype=dtype, scale=1 + r).detach() * (1 + 0.1 * r) for r in range(count)]


@pytest.mark.parametrize("live", [True, False], ids=["live", "no-live"])
@pytest.mark.parametrize("sets", [1, 2, 5])
@pytest.mark.parametrize("length", [1, 2, 7, 49])
@pytest.mark.parametrize("name", ROUTES)
def test_two_phases_equal_one_softmax(name: str, length: int, sets: int, live: bool):
    rule, streams = ROUTES[name]
    *history, partial = states(length + 1, streams, (3, 4, 13))
    queries = random(sets, len(rule.key), 13)
    merged, log_partition = reference.prefix(history, queries, rule, EPS)
    candidates = history
    if live:
        merged = reference.merge(merged, log_partition, partial, queries, rule, EPS)
        candidates = [*history, partial]
    assert relative_error(merged, reference.retrieve(candidates, queries, rule, EPS)) < 1e-12


@pytest.mark.parametrize("name", ROUTES)
def test_retrieval_is_the_papers_sum(name: str):
    """One token, written out: π_r^j from the scored stream, values from the returned one."""
    rule, streams = ROUTES[name]
    candidates = states(4, streams, (1, 1, 5))
    queries = random(1, len(rule.key), 5)
    for j, (key, value) in enumerate(zip(*rule, strict=True)):
        kernel = []
        for state in candidates:
            k = state[key, 0, 0]
            kernel.append(torch.exp(queries[0, j] @ (k / (k.square().mean() + EPS).sqrt())))
        terms = [phi / sum(kernel) * state[value, 0, 0] for phi, state in zip(kernel, candidates, strict=True)]
        expected = torch.stack(terms).sum(0)
        assert relative_error(reference.retrieve(candidates, queries, rule, EPS)[0, j, 0, 0], expected) < 1e-12


@pytest.mark.parametrize("name", ROUTES)
def test_depth_weights_sum_to_one(name: str):
    rule, streams = ROUTES[name]
    weights = reference.depth_weights(states(9, streams, (2, 3, 11)), random(2, len(rule.key), 11), rule, EPS)
    assert weights.shape == (9, 2, len(rule.key), 2, 3)
    torch.testing.assert_close(weights.sum(0), torch.ones_like(weights[0]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ROUTES)
def test_retrieval_gradients(name: str):
    rule, streams = ROUTES[name]
    shape = (2, 3, 5)
    history = [random(streams, *shape), random(streams, *shape, scale=0.5), random(streams, *shape, scale=2)]
    live, queries = random(streams, *shape, scale=1.5), random(2, len(rule.key), 5)

    def both(queries: Tensor, live: Tensor, *history: Tensor) -> tuple[Tensor, Tensor]:
        retrieved, log_partition = reference.prefix(history, queries, rule, EPS)
        return reference.merge(retrieved, log_partition, live, queries, rule, EPS), log_partition

    assert gradcheck(both, (queries, live, *history))


GATE_ROWS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "gate_logits": (lambda x, w, s, b: reference.gate_logits(x, w, s, b, EPS), [(2, 1, 3, 5), (3, 2, 5), (1,), (3,)]),
    "mix": (reference.mix, [(2, 1, 3), (2, 1, 3, 5)]),
    "transport": (reference.transport, [(1, 3), (2, 1, 3, 5)]),
    "gated_write": (reference.gated_write, [(2, 1, 3), (1, 3, 5)]),
    "sinkhorn": (lambda x: reference.sinkhorn(x, 20), [(3, 3, 1, 2)]),
    "mix_streams": (reference.mix_streams, [(4, 4, 1, 3), (4, 1, 3, 5)]),
}


@pytest.mark.parametrize("name", GATE_ROWS)
def test_gate_gradients(name: str):
    op, shapes = GATE_ROWS[name]
    assert gradcheck(op, tuple(random(*shape) for shape in shapes))


def test_transport_is_doubly_stochastic():
    rho = torch.sigmoid(random(3, 4, scale=3)).detach()
    matrix = torch.stack(
        [reference.transport(rho, unit.expand(3, 4, 2).permute(2, 0, 1)[..., None]) for unit in torch.eye(2)]
    )
    matrix = matrix[..., 0]  # (column, row, B, T)
    torch.testing.assert_close(matrix[0, 0], rho.to(matrix.dtype))
    torch.testing.assert_close(matrix[1, 0], 1 - rho.to(matrix.dtype))
    torch.testing.assert_close(matrix.sum(0), torch.ones_like(matrix[0]))
    torch.testing.assert_close(matrix.sum(1), torch.ones_like(matrix[0]))


@pytest.mark.parametrize("streams", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("scale", "steps"), [(1.0, 500), (0.3, 20)], ids=["wide", "narrow"])
def test_sinkhorn_is_doubly_stochastic(scale: float, steps: int, streams: int):
    """Rows are scaled last and exact; columns converge geometrically, the faster the closer the logits are."""
    matrix = reference.sinkhorn(random(streams, streams, 2, 3, scale=scale), steps)
    torch.testing.assert_close(matrix.sum(1), torch.ones_like(matrix[0]), rtol=0, atol=1e-14)
    torch.testing.assert_close(matrix.sum(0), torch.ones_like(matrix[0]), rtol=0, atol=1e-12)
    assert (matrix > 0).all()


@pytest.mark.parametrize("streams", [2, 4])
def test_sinkhorn_where_mhc_starts(streams: int):
    """0 on the diagonal and −8 off it: doubly stochastic at once. Moved by 0.1, 20 steps leave the columns off."""
    start = (-8.0 * (1 - torch.eye(streams, dtype=torch.float64)))[:, :, None, None]
    for moved, columns in ((0.0, 1e-12), (0.1, 1e-3)):
        matrix = reference.sinkhorn(start + moved * random(streams, streams, 2, 3).detach(), 20)
        torch.testing.assert_close(matrix.sum(1), torch.ones_like(matrix[0]), rtol=0, atol=1e-14)
        torch.testing.assert_close(matrix.sum(0), torch.ones_like(matrix[0]), rtol=0, atol=columns)
        assert matrix.diagonal().min() > 0.99


def test_sinkhorn_survives_extreme_logits():
    logits = torch.tensor([[0.0, -500.0], [-500.0, 300.0]])[:, :, None, None]
    torch.testing.assert_close(reference.sinkhorn(logits, 20)[..., 0, 0], torch.eye(2))


def test_gate_norm_spans_all_streams():
    """Norm([x⁰; x¹]) is one norm over both streams: scaling one changes the other's share."""
    x, weight = random(2, 1, 1, 3).detach(), random(1, 2, 3).detach()
    both = torch.cat([x[0, 0, 0], x[1, 0, 0]])
    expected = 0.5 * (both / (both.square().mean() + EPS).sqrt()) @ weight.flatten() + 0.25
    logit = reference.gate_logits(x, weight, torch.tensor([0.5]).double(), torch.tensor([0.25]).double(), EPS)
    torch.testing.assert_close(logit[0, 0, 0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ROUTES)
def test_low_precision_reduces_in_float32(name: str, dtype: torch.dtype):
    """Odd shapes; the only errors are those of storing inputs and outputs in the low precision."""
    rule, streams = ROUTES[name]
    history = [state.to(dtype) for state in states(5, streams, (3, 37, 123))]
    live, queries = history.pop(), random(2, len(rule.key), 123, dtype=dtype, scale=0.2).detach()
    retrieved, log_partition = ops.prefix(history, queries, rule, EPS)
    merged = ops.merge(retrieved, log_partition, live, queries, rule, EPS)
    assert (retrieved.dtype, log_partition.dtype, merged.dtype) == (dtype, torch.float32, dtype)

    exact = [state.double() for state in history]
    wanted, wanted_partition = reference.prefix(exact, queries.double(), rule, EPS)
    stored = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]  # half a unit in the last place
    assert relative_error(log_partition, wanted_partition) < 1e-6
    assert relative_error(retrieved, wanted) < stored
    candidates = [*exact, live.double()]
    assert relative_error(merged, reference.retrieve(candidates, queries.double(), rule, EPS)) < stored


LOW_PRECISION = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}  # half a unit in the last place
WIDE_ROWS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "gate_logits": (lambda x, w, s, b: ops.gate_logits(x, w, s, b, EPS), [(2, 3, 37, 123), (3, 2, 123), (1,), (3,)]),
    "mix": (ops.mix, [(8, 3, 37), (8, 3, 37, 123)]),
    "transport": (ops.transport, [(3, 37), (2, 3, 37, 123)]),
    "gated_write": (ops.gated_write, [(2, 3, 37), (3, 37, 123)]),
    "mix_streams": (ops.mix_streams, [(8, 8, 3, 37), (8, 3, 37, 123)]),
}


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("name", WIDE_ROWS)
def test_low_precision_streams_are_rounded_once(name: str, dtype: torch.dtype):
    """Gates are float32, streams and weights in the low precision, and the result is rounded to it at most once."""
    op, shapes = WIDE_ROWS[name]
    stored = (0, 1, 2, 3) if name == "gate_logits" else (1,)  # the other inputs are gates
    inputs = [random(*shape).detach() for shape in shapes]
    low = [x.to(dtype if i in stored else torch.float32) for i, x in enumerate(inputs)]
    ours, wanted = op(*low), op(*(x.double() for x in low))
    logits = name == "gate_logits"
    assert ours.dtype == (torch.float32 if logits else dtype)
    assert relative_error(ours, wanted) < (1e-6 if logits else LOW_PRECISION[dtype] / 2)


@pytest.mark.parametrize("name", ["prefix", "merge", *WIDE_ROWS])
def test_autocast_rounds_nothing(name: str):
    if name in WIDE_ROWS:
        op, shapes = WIDE_ROWS[name]
        inputs = [random(*shape, dtype=torch.float32).detach() for shape in shapes]
    else:
        history = states(4, 2, (2, 5, 64), torch.float32)
        queries = random(2, 2, 64, dtype=torch.float32).detach()
        retrieved, log_partition = ops.prefix(history, queries, route.DUAL, EPS)
        if name == "prefix":
            op, inputs = (lambda *h: ops.prefix(h, queries, route.DUAL, EPS)[0]), history
        else:
            op = lambda h, z, live: ops.merge(h, z, live, queries, route.DUAL, EPS)  # noqa: E731
            inputs = [retrieved, log_partition, history[0]]
    plain = op(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(op(*inputs), plain)
