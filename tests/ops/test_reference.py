"""The reference operators: gradients, the two-phase identity, and the invariants that the paper states."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from dualres.ops import GateParameters, Live, Norm, Prefix, Route, reference
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


def retrieve(candidates: list[Tensor], queries: Tensor, rule: Route) -> Tensor:
    """h^j = Σ_r π_r^j v_r^j: one softmax over all candidates. R × (J,B,T,D), (U,O,D) -> (U,O,B,T,D)"""
    values = torch.stack([state[list(rule.value)] for state in candidates])
    return torch.einsum("ruo...,ro...d->uo...d", reference.depth_weights(candidates, queries, rule, EPS), values)


@pytest.mark.parametrize("live", [True, False], ids=["live", "no-live"])
@pytest.mark.parametrize("sets", [1, 2, 5])
@pytest.mark.parametrize("length", [1, 2, 7, 49])
@pytest.mark.parametrize("name", ROUTES)
def test_two_phases_equal_one_softmax(name: str, length: int, sets: int, live: bool):
    rule, streams = ROUTES[name]
    *history, partial = states(length + 1, streams, (3, 4, 13))
    queries = random(sets, len(rule.key), 13)
    found = reference.prefix(history, queries, route=rule, eps=EPS)
    candidates = [*history, partial] if live else history
    retrieved = [prefix.retrieved for prefix in found]
    if live:
        each = zip(found, queries, strict=True)
        retrieved = [reference.merge(prefix, partial, query, rule, EPS) for prefix, query in each]
    assert relative_error(torch.stack(retrieved), retrieve(candidates, queries, rule)) < 1e-12


@pytest.mark.parametrize("name", ROUTES)
def test_retrieval_is_the_papers_sum(name: str):
    """One token, written out: π_r^j from the key stream, values from the value stream."""
    rule, streams = ROUTES[name]
    candidates = states(4, streams, (1, 1, 5))
    queries = random(1, len(rule.key), 5)
    (found,) = reference.prefix(candidates, queries, route=rule, eps=EPS)
    for j, (key, value) in enumerate(zip(*rule, strict=True)):
        kernel = []
        for state in candidates:
            k = state[key, 0, 0]
            kernel.append(torch.exp(queries[0, j] @ (k / (k.square().mean() + EPS).sqrt())))
        terms = [phi / sum(kernel) * state[value, 0, 0] for phi, state in zip(kernel, candidates, strict=True)]
        expected = torch.stack(terms).sum(0)
        assert relative_error(found.retrieved[j, 0, 0], expected) < 1e-12


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
        first, second = reference.prefix(history, queries, route=rule, eps=EPS)
        return reference.merge(second, live, queries[1], rule, EPS), first.log_partition

    assert gradcheck(both, (queries, live, *history))


GATE_ROWS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "gate_logits": (
        lambda x, *gate: reference.gate_logits(x, GateParameters(*gate), EPS),
        [(2, 1, 3, 5), (3, 2, 5), (1,), (3,)],
    ),
    "mix": (reference.mix, [(2, 1, 3), (2, 1, 3, 5)]),
    "transport": (reference.transport, [(1, 3), (4, 2, 1, 3)]),
    "rms_norm": (lambda h, weight: reference.rms_norm(h, Norm(weight, EPS)), [(1, 3, 5), (5,)]),
    "sinkhorn": (lambda x: reference.sinkhorn(x, 20), [(3, 3, 1, 2)]),
    "combine": (lambda c, *u: reference.combine(Live(u, c)), [(3, 2, 1, 3), (1, 3, 5), (1, 3, 5), (1, 3, 5)]),
}


@pytest.mark.parametrize("name", GATE_ROWS)
def test_gate_gradients(name: str):
    op, shapes = GATE_ROWS[name]
    assert gradcheck(op, tuple(random(*shape) for shape in shapes))


def test_transport_is_doubly_stochastic():
    rho = torch.sigmoid(random(3, 4, scale=3)).detach()
    units = torch.eye(2, dtype=rho.dtype)[:, :, None, None].expand(2, 2, 3, 4)
    matrix = reference.transport(rho, units)  # (column, row, B, T)
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
    gate = GateParameters(weight, torch.tensor([0.5]).double(), torch.tensor([0.25]).double())
    logit = reference.gate_logits(x, gate, EPS)
    torch.testing.assert_close(logit[0, 0, 0], expected)


def test_transport_of_coefficients_is_transport_of_streams():
    """M(ρ) P + [β⁰u, β¹u], the paper's write, is the same sum with coefficients [M(ρ) C, β]."""
    updates, coefficients = (random(1, 3, 5), random(1, 3, 5, scale=2)), random(2, 2, 1, 3)
    rho, beta, u = torch.sigmoid(random(1, 3)), random(2, 1, 3), random(1, 3, 5, scale=3)
    live = reference.combine(Live(updates, coefficients))
    keep = rho.unsqueeze(-1)
    written = keep * live + (1 - keep) * live.flip(0) + beta.unsqueeze(-1) * u
    left = torch.cat([reference.transport(rho, coefficients), beta.unsqueeze(0)])
    assert relative_error(reference.combine(Live((*updates, u), left)), written) < 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ROUTES)
def test_low_precision_reduces_in_float32(name: str, dtype: torch.dtype):
    """Odd shapes; the only errors are those of storing inputs and outputs in the low precision."""
    rule, streams = ROUTES[name]
    history = [state.to(dtype) for state in states(5, streams, (3, 37, 123))]
    queries = random(2, len(rule.key), 123, dtype=dtype, scale=0.2).detach()
    retrieved, log_partition, _ = zip(*reference.prefix(history, queries, route=rule, eps=EPS), strict=True)
    assert (retrieved[0].dtype, log_partition[0].dtype) == (dtype, torch.float32)
    exact = [state.double() for state in history]
    wanted, wanted_partition, _ = zip(*reference.prefix(exact, queries.double(), route=rule, eps=EPS), strict=True)
    stored = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]  # half a unit in the last place
    assert relative_error(torch.stack(log_partition), torch.stack(wanted_partition)) < 1e-6
    assert relative_error(torch.stack(retrieved), torch.stack(wanted)) < stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_read_rounds_once(dtype: torch.dtype):
    """Streams in the low precision, everything between them in float32."""
    shape, width = (3, 37), 123
    h, updates = random(2, *shape, width, dtype=dtype), [random(*shape, width, dtype=dtype) for _ in range(2)]
    partition, coefficients = random(2, *shape, dtype=torch.float32), random(2, 2, *shape, dtype=torch.float32)
    queries, weight = random(2, width, dtype=torch.float32, scale=0.2), random(width, dtype=torch.float32)
    gates = [
        GateParameters(*(random(*size, dtype=torch.float32) for size in ((values, 2, width), (1,), (values,))))
        for values in (2, 2, 1)
    ]

    def read(cast: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        own = [GateParameters(*map(cast, gate)) for gate in gates]
        live, norm = Live(tuple(map(cast, updates)), cast(coefficients)), Norm(cast(weight), EPS)
        prefix, query = Prefix(cast(h), cast(partition)), cast(queries)
        h_, left = reference.gated_read(prefix, live, query=query, gates=own, route=route.DUAL, eps=EPS, norm=norm)
        return h_, left.coefficients

    (ours, left), (wanted, wanted_left) = read(lambda x: x), read(Tensor.double)
    assert (ours.dtype, left.dtype) == (dtype, torch.float32)
    assert relative_error(ours, wanted) < {torch.float32: 1e-6, torch.float16: 2.5e-4, torch.bfloat16: 2e-3}[dtype]
    assert relative_error(left, wanted_left) < 1e-6
