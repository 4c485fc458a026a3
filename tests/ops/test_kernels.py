"""The kernels, CPU and Triton in its interpreter: every operator and every gradient against the float64 reference."""

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dualres import ops
from dualres.model.block import residual_stack
from dualres.ops import GateParameters, Live, Norm, Prefix, dispatch, reference
from dualres.residual import route
from dualres.residual.live import appended, of_streams, plus
from tests.small import relative_error

EPS, NORM_EPS = 1e-6, 1e-5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROWS = ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.slow)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
KINDS = ["cpu", "triton"]
ROUTES = {
    "single": (route.SINGLE, 1),
    "vproj": (route.VALUE_PROJECTED, 2),
    "dual": (route.DUAL, 2),
    "self_kv": (route.SELF_KV, 2),
    "fixed_kv": (route.FIXED_KV, 2),
    "cross_v": (route.CROSS_V, 2),
}
ODD = (3, 37, 123)  # B, T, D
WIDTH = ODD[-1]


@pytest.fixture(params=KINDS)
def kind(request: Any, monkeypatch: Any) -> str:
    """Each kind of kernels in turn."""
    if request.param == "triton":
        pytest.importorskip("triton")
        from tests.ops.meter import round_to_nearest

        round_to_nearest()
    monkeypatch.setattr(dispatch, "FORCED", request.param)
    return request.param


class Numbers:
    """Random tensors, in turn from one generator, and the shape that streams should have."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, int, int] = ODD):
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(0)
        self.shape, self.width = shape, shape[-1]

    def parameter(self, *shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=self.generator)

    def stream(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.parameter(*shape, scale=scale).to(self.dtype)

    def gate(self, values: int, streams: int, width: int) -> GateParameters:
        return GateParameters(
            self.parameter(values, streams, width, scale=width**-0.5), self.parameter(1), self.parameter(values)
        )


Op = Callable[..., Sequence[Tensor]]


def compare(ours: Op, exact: Op, inputs: list[Tensor], dtype: torch.dtype) -> None:
    """Results and the gradients of all inputs: `ours` on the inputs, `exact` on the same numbers in float64."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    results, wanted = list(ours(*leaves)), list(exact(*doubles))
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in results]
    found = torch.autograd.grad(results, leaves, given, allow_unused=True)
    truth = torch.autograd.grad(wanted, doubles, [x.double() for x in given], allow_unused=True)
    for i, (a, b) in enumerate(zip(results, wanted, strict=True)):
        assert relative_error(a, b) < TOLERANCE[dtype], f"result {i}"
    small: list[tuple[Tensor, Tensor]] = []
    for i, (a, b) in enumerate(zip(found, truth, strict=True)):
        assert (a is None) == (b is None), f"gradient {i}"
        if b is None or b.abs().max() < 1e-9:  # one candidate has weight 1, whatever the query
            continue
        assert a.dtype == inputs[i].dtype
        if b.ndim == 1 and b.numel() < WIDTH:
            small.append((a, b))
        else:
            assert relative_error(a, b) < TOLERANCE[dtype], f"gradient {i}"
    if small:  # scales and biases: sums over tokens that may cancel to nearly nothing, so they are taken together
        ours_joined, truth_joined = (torch.cat(each) for each in zip(*small, strict=True))
        assert relative_error(ours_joined, truth_joined) < TOLERANCE[dtype], "scales and biases"


def flat_prefix(found: tuple[Prefix, ...]) -> list[Tensor]:
    return [tensor for prefix in found for tensor in prefix[:2]]


@pytest.mark.axes(kind="cpu", name="dual", dtype="fp32")
@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize("name", ROUTES)
def test_prefix(kind: str, name: str, dtype: str):
    check_prefix(name, states=5, sets=2, shape=ODD, dtype=DTYPES[dtype])


def test_prefix_of_queries_that_do_not_fit_together(monkeypatch: Any):
    """Very wide rows leave registers for some queries only; then the history is read once for each group of them."""
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "FORCED", "triton")
    dispatch.module("triton")
    own = sys.modules["dualres.ops.triton.prefix"]
    monkeypatch.setattr(own, "REGISTERS", 2 * 128 * 2)  # two sets of two queries, at this width
    assert own.group_size(4, 2, WIDTH) == 2
    check_prefix("dual", 3, 4, (1, 3, WIDTH), torch.float32)


@pytest.mark.axes(kind="cpu", name="dual", states=3, sets=1)
@pytest.mark.parametrize("sets", [1, 3])
@pytest.mark.parametrize("states", [1, 2, 3, 4, 9, 17, 49])
@pytest.mark.parametrize("name", ["single", "dual", "fixed_kv"])
def test_prefix_at_every_depth(kind: str, name: str, states: int, sets: int):
    check_prefix(name, states, sets, shape=(1, 3, 21), dtype=torch.float32)


def check_prefix(name: str, states: int, sets: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rule, streams = ROUTES[name]
    draw = Numbers(dtype)
    history = [draw.stream(streams, *shape, scale=0.5 + 0.3 * r) for r in range(states)]
    queries = draw.parameter(sets, len(rule.key), shape[-1], scale=0.3)
    compare_prefix(history, queries, rule, dtype)


def compare_prefix(
    history: list[Tensor],
    queries: Tensor,
    rule: ops.Route,
    dtype: torch.dtype,
    results: Callable[..., Sequence[Tensor]] = flat_prefix,
) -> None:
    def ours(queries: Tensor, *history: Tensor) -> Sequence[Tensor]:
        return results(ops.prefix(history, queries, route=rule, eps=EPS))

    def exact(queries: Tensor, *history: Tensor) -> Sequence[Tensor]:
        return results(reference.prefix(history, queries, route=rule, eps=EPS))

    compare(ours, exact, [queries, *history], dtype)


def test_prefix_where_one_state_has_nearly_all_weight(kind: str):
    """There the gradient of the queries is a small difference of large numbers."""
    draw = Numbers(torch.float32)
    queries = 12 * torch.nn.functional.normalize(draw.parameter(1, 2, WIDTH), dim=-1)  # the logit of a state along it
    along = queries[0].flip(0)[:, None, None] * WIDTH**0.5 / 12  # of stream j, which the other output asks
    history = [draw.stream(2, *ODD, scale=0.1) + along, draw.stream(2, *ODD), draw.stream(2, *ODD)]
    compare_prefix(history, queries / WIDTH**0.5, route.DUAL, torch.float32, results=lambda found: [found[0].retrieved])


# id -> how many updates, whether the branch's norm is applied
READS = {
    f"{k}-updates-{'normed' if normed else 'plain'}": (k, normed) for k in (0, 1, 3, 6) for normed in (True, False)
}


@pytest.mark.axes(kind="cpu", name="single", row="3-updates-normed", dtype="fp32")
@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize("row", [row for row in READS if row != "0-updates-plain"])  # which is no operator
@pytest.mark.parametrize("name", ["single", "vproj"])
def test_read(kind: str, name: str, row: str, dtype: str):
    (rule, streams), (count, normed) = ROUTES[name], READS[row]
    draw = Numbers(DTYPES[dtype])
    coefficients = draw.parameter(count, streams, *ODD[:2])
    inputs = [
        draw.stream(1, *ODD),
        draw.parameter(1, *ODD[:2]),
        draw.parameter(1, ODD[-1], scale=0.3),
        draw.parameter(ODD[-1]),
        *(draw.stream(*ODD) for _ in range(count)),
    ]

    def op(read: Callable[..., Tensor], wide: Callable[[Tensor], Tensor]) -> Callable[..., list[Tensor]]:
        def call(h: Tensor, partition: Tensor, queries: Tensor, weight: Tensor, *updates: Tensor) -> list[Tensor]:
            norm = Norm(weight, NORM_EPS) if normed else None
            live = Live(updates, wide(coefficients)) if updates else None
            return [read(Prefix(h, partition), live, query=queries, route=rule, eps=EPS, norm=norm)]

        return call

    ours = op(lambda *args, **kwargs: ops.read(*args, **kwargs)[0], lambda x: x)
    compare(ours, op(reference.read, Tensor.double), inputs, DTYPES[dtype])


@pytest.mark.axes(kind="cpu", name="dual", row="3-updates-normed", dtype="fp32")
@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize("row", READS)
@pytest.mark.parametrize("name", ["dual", "self_kv", "fixed_kv", "cross_v"])
def test_gated_read(kind: str, name: str, row: str, dtype: str):
    rule, (count, normed) = ROUTES[name][0], READS[row]
    draw = Numbers(DTYPES[dtype])
    width = ODD[-1]
    gates = [draw.gate(values, 2, width) for values in ((2, 2, 1) if count else (2, 2))]
    inputs = [
        draw.stream(2, *ODD),
        draw.parameter(2, *ODD[:2]),
        draw.parameter(2, width, scale=0.3),
        draw.parameter(width),
        draw.parameter(count, 2, *ODD[:2]),
        *(parameter for gate in gates for parameter in gate),
        *(draw.stream(*ODD) for _ in range(count)),
    ]

    def op(read: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
        def call(
            h: Tensor, partition: Tensor, queries: Tensor, weight: Tensor, coefficients: Tensor, *rest: Tensor
        ) -> tuple[Tensor, Tensor]:
            own = [GateParameters(*rest[3 * g : 3 * g + 3]) for g in range(len(gates))]
            norm = Norm(weight, NORM_EPS) if normed else None
            live = Live(rest[3 * len(gates) :], coefficients) if count else None
            h, *_, left = read(Prefix(h, partition), live, query=queries, gates=own, route=rule, eps=EPS, norm=norm)
            return h, left.coefficients

        return call

    compare(op(ops.gated_read), op(reference.gated_read), inputs, DTYPES[dtype])


# Odd streams: kernels take two at a time, or pad them to a power of two.
SIZES = [(2, 2, 20), (3, 5, 7), (3, 6, 20), (4, 4, 20), (4, 6, 3), (4, 6, 20), (8, 9, 3)]


@pytest.mark.axes(kind="cpu", streams=4, count=6, steps=20, normed=True, dtype="fp32")
@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize(("streams", "count", "steps"), SIZES)
def test_hyper_read(kind: str, streams: int, count: int, steps: int, normed: bool, dtype: str):
    draw = Numbers(DTYPES[dtype])
    width = ODD[-1]
    gates = [draw.gate(values, streams, width) for values in (streams, streams, streams * streams)]
    inputs = [
        draw.parameter(width),
        draw.parameter(count, streams, *ODD[:2]),
        *(parameter for gate in gates for parameter in gate),
        *(draw.stream(*ODD) for _ in range(count)),
    ]

    def op(read: Callable[..., tuple[Tensor, Live]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def call(weight: Tensor, coefficients: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
            own = [GateParameters(*rest[3 * g : 3 * g + 3]) for g in range(3)]
            norm = Norm(weight, NORM_EPS) if normed else None
            h, left = read(Live(rest[9:], coefficients), gates=own, steps=steps, eps=EPS, norm=norm)
            return h, left.coefficients

        return call

    compare(op(ops.hyper_read), op(reference.hyper_read), inputs, DTYPES[dtype])


def test_sinkhorn_survives_extreme_logits(kind: str):
    """As the reference does: by logarithms where plain numbers vanish, as those of a whole row do here."""
    width = 8
    updates = tuple(torch.randn(1, 2, width) for _ in range(2))
    coefficients = torch.eye(2)[:, :, None, None].expand(2, 2, 1, 2).contiguous()
    for logits, wanted in [
        ((0.0, -900.0, -900.0, 300.0), torch.eye(2)),
        ((0.0, 0.0, -900.0, -900.0), torch.full((2, 2), 0.5)),
    ]:
        biases = [torch.zeros(2), torch.zeros(2), torch.tensor(logits)]
        gates = [GateParameters(torch.zeros(len(b), 2, width), torch.zeros(1), b) for b in biases]
        _, left = ops.hyper_read(Live(updates, coefficients), gates=gates, steps=20, eps=EPS, norm=None)
        assert (left.coefficients[:2, :, 0].movedim(-1, 0) - wanted).abs().max() < 1e-4


@pytest.mark.axes(kind="cpu", streams=2, count=3, learned=True, dtype="fp32")
@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "constant"])
@pytest.mark.parametrize(("streams", "count"), [(1, 1), (2, 3), (3, 3), (2, 9), (4, 6), (8, 12)])
def test_write(kind: str, streams: int, count: int, learned: bool, dtype: str):
    draw = Numbers(DTYPES[dtype])
    coefficients = draw.parameter(count, streams, *ODD[:2])
    updates = [draw.stream(*ODD) for _ in range(count)]
    if learned:
        inputs = [coefficients, *updates]
        exact = lambda c, *u: [reference.write(Live(u, c))]  # noqa: E731
        compare(lambda c, *u: [ops.write(Live(u, c))], exact, inputs, DTYPES[dtype])
    else:
        exact = lambda *u: [reference.write(Live(u, coefficients.double()))]  # noqa: E731
        compare(lambda *u: [ops.write(Live(u, coefficients))], exact, updates, DTYPES[dtype])


def chain_of_gated_reads(draw: Numbers) -> tuple[list[Tensor], Op]:
    inputs = [draw.stream(2, *draw.shape), draw.parameter(2, *draw.shape[:2]), draw.parameter(2, draw.width, scale=0.3)]
    inputs += [parameter for values in (2, 2, 1) for parameter in draw.gate(values, 2, draw.width)]

    def call(h: Tensor, partition: Tensor, query: Tensor, *rest: Tensor) -> list[Tensor]:
        gates = [GateParameters(*rest[g : g + 3]) for g in (0, 3, 6)]
        prefix, live, found = Prefix(h, partition), None, []
        for update in rest[9:]:
            used: Any = {"query": query, "gates": gates if live else gates[:2], "norm": None}
            read, prefix, live = ops.gated_read(prefix, live, route=route.DUAL, eps=EPS, **used)
            live = appended(live, update)
            found.append(read)
        assert live is not None
        return [*found, ops.write(live)]

    return [*inputs, *(draw.stream(*draw.shape) for _ in range(4))], call


def chain_of_reads(rule: ops.Route, streams: int) -> Callable[[Numbers], tuple[list[Tensor], Op]]:
    def inputs(draw: Numbers) -> tuple[list[Tensor], Op]:
        given = [
            draw.stream(1, *draw.shape),
            draw.parameter(1, *draw.shape[:2]),
            draw.parameter(1, draw.width, scale=0.3),
        ]
        return [*given, draw.parameter(draw.width), *(draw.stream(*draw.shape) for _ in range(3 * streams))], call

    def call(h: Tensor, partition: Tensor, query: Tensor, weight: Tensor, *updates: Tensor) -> list[Tensor]:
        prefix, live, found, norm = Prefix(h, partition), None, [], Norm(weight, NORM_EPS)
        for n in range(0, len(updates), streams):
            read, prefix, live = ops.read(prefix, live, query=query, route=rule, eps=EPS, norm=norm)
            live = plus(live, updates[n : n + streams])
            found.append(read)
        assert live is not None
        return [*found, ops.write(live)]

    return inputs


def chain_of_hyper_reads(draw: Numbers) -> tuple[list[Tensor], Op]:
    gates = [parameter for values in (3, 3, 9) for parameter in draw.gate(values, 3, draw.width)]

    def call(state: Tensor, *rest: Tensor) -> list[Tensor]:
        live, found, own = of_streams(state), [], [GateParameters(*rest[g : g + 3]) for g in (0, 3, 6)]
        for update in rest[9:]:
            read, live = ops.hyper_read(live, gates=own, steps=20, eps=EPS, norm=None)
            live = appended(live, update)
            found.append(read)
        return [*found, ops.write(live)]

    return [draw.stream(3, *draw.shape), *gates, *(draw.stream(*draw.shape) for _ in range(3))], call


def chain_of_prefixes(draw: Numbers) -> tuple[list[Tensor], Op]:
    def call(queries: Tensor, *history: Tensor) -> list[Tensor]:
        found: list[Prefix] = []
        for _ in range(3):
            prefixes, carriers = ops.prefix_with_carriers(history, queries, route=route.DUAL, eps=EPS)
            history = ops.passed_on(history, carriers)
            found += prefixes
        return flat_prefix(tuple(found))

    return [draw.parameter(2, 2, draw.width, scale=0.3), *(draw.stream(2, *draw.shape) for _ in range(3))], call


CHAINS = {
    "gated_read": chain_of_gated_reads,
    "read": chain_of_reads(route.SINGLE, 1),
    "read-vproj": chain_of_reads(route.VALUE_PROJECTED, 2),
    "hyper_read": chain_of_hyper_reads,
    "prefix": chain_of_prefixes,
}


@pytest.mark.axes(kind="cpu", name="gated_read", dtype="fp32")
@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize("name", CHAINS)
def test_gradients_that_are_passed_on(kind: str, name: str, dtype: str):
    """Every operator but the last adds to a gradient that a later one has sent through a carrier."""
    inputs, call = CHAINS[name](Numbers(DTYPES[dtype]))
    compare(call, call, inputs, DTYPES[dtype])  # in float64 these are the equations, without carriers


@pytest.mark.parametrize("width", [300, 1040])
@pytest.mark.parametrize("name", ["gated_read", "read", "read-vproj"])
def test_tiles_of_few_tokens(name: str, width: int, monkeypatch: Any):
    """On a CPU, a tile of wide rows has 13 or 4 tokens; both widths end with half a pair of vectors."""
    monkeypatch.setattr(dispatch, "FORCED", "cpu")
    inputs, call = CHAINS[name](Numbers(torch.float32, (1, 75, width)))
    compare(call, call, inputs, torch.float32)


@pytest.mark.parametrize("name", ["gated_read", "hyper_read"])
def test_nothing_else_sums_gradients_of_streams(name: str):
    """A stream, or a state of several, is read by many operators and gets one gradient."""
    inputs, call = CHAINS[name](Numbers(torch.float32))
    leaves = [x.requires_grad_() for x in inputs]
    results = call(*leaves)
    with Additions() as added:
        torch.autograd.backward(results, [torch.ones_like(x) for x in results])
    assert added.shapes  # of parameters
    assert not [shape for shape in added.shapes if shape[-3:] == ODD]


class Additions(TorchDispatchMode):
    """The shapes of all sums of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_):
            self.shapes.append(args[0].shape)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("residual", ["attnres-block", "dar-block", "mhc"])
def test_tensors_go_when_they_are_done(residual: str):
    """At once, not at the next garbage collection: no operator leaves a reference cycle around its tensors."""
    branches = [torch.nn.Linear(8, 8) for _ in range(4)]
    stack, given = residual_stack(branches, 8, residual), torch.randn(2, 3, 8, requires_grad=True)
    stack(given).sum().backward()  # kernels are compiled
    updates: list[weakref.ref[Tensor]] = []
    for branch in branches:
        branch.register_forward_hook(lambda module, inputs, output: updates.append(weakref.ref(output)))
    gc.collect()
    gc.disable()
    try:
        stack(given).sum().backward()
        assert [update() for update in updates] == [None] * len(branches)
    finally:
        gc.enable()
