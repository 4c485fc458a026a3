"""Any token axes, as with `nn.Linear`: what a flat batch gives, in another shape; and no tokens at all."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dualres import ops
from dualres.model.block import NormedBranch, ResidualStack, compile_blocks, residual_stack
from dualres.ops import GateParameters, Live, Norm, Prefix, dispatch
from dualres.residual import route
from tests.small import RESIDUALS

WIDTH, EPS = 24, 1e-6
SHAPES = {"one": (), "flat": (12,), "image": (2, 3, 2), "video": (2, 1, 3, 2), "none": (0,), "no-images": (2, 0, 3)}


def gate(values: int, streams: int) -> GateParameters:
    return GateParameters(torch.randn(values, streams, WIDTH), torch.randn(1), torch.randn(values))


def prefix(draw: Callable[..., Tensor]) -> tuple[list[Tensor], Callable[..., Any]]:
    queries = torch.randn(2, 2, WIDTH)
    inputs = [draw(2, WIDTH), draw(2, WIDTH), draw(2, WIDTH)]
    return inputs, lambda *history: [
        tensor for found in ops.prefix(history, queries, route=route.DUAL, eps=EPS) for tensor in found[:2]
    ]


def gated_read(draw: Callable[..., Tensor]) -> tuple[list[Tensor], Callable[..., Any]]:
    gates, queries, norm = [gate(2, 2), gate(2, 2), gate(1, 2)], torch.randn(2, WIDTH), Norm(torch.randn(WIDTH), EPS)
    inputs = [draw(2, WIDTH), draw(2, None), draw(3, 2, None), *(draw(WIDTH) for _ in range(3))]

    def call(h: Tensor, partition: Tensor, coefficients: Tensor, *updates: Tensor) -> list[Tensor]:
        prefix, live = Prefix(h, partition), Live(updates, coefficients)
        read, _, left = ops.gated_read(prefix, live, query=queries, gates=gates, route=route.DUAL, eps=EPS, norm=norm)
        return [read, left.coefficients]

    return inputs, call


def read(draw: Callable[..., Tensor]) -> tuple[list[Tensor], Callable[..., Any]]:
    queries, coefficients = torch.randn(1, WIDTH), draw(2, 1, None)
    inputs = [draw(1, WIDTH), draw(1, None), draw(WIDTH), draw(WIDTH)]
    return inputs, lambda h, partition, *updates: [
        ops.read(
            Prefix(h, partition),
            Live(updates, coefficients.detach()),
            query=queries,
            route=route.SINGLE,
            eps=EPS,
            norm=None,
        )[0]
    ]


def normed(draw: Callable[..., Tensor]) -> tuple[list[Tensor], Callable[..., Any]]:
    norm = Norm(torch.randn(WIDTH), EPS)
    return [draw(1, WIDTH)], lambda stream: [ops.rms_norm(stream, norm)]


def hyper_read(draw: Callable[..., Tensor]) -> tuple[list[Tensor], Callable[..., Any]]:
    gates, norm = [gate(3, 3), gate(3, 3), gate(9, 3)], Norm(torch.randn(WIDTH), EPS)
    inputs = [draw(4, 3, None), *(draw(WIDTH) for _ in range(4))]

    def call(coefficients: Tensor, *updates: Tensor) -> list[Tensor]:
        read, left = ops.hyper_read(Live(updates, coefficients), gates=gates, steps=5, eps=EPS, norm=norm)
        return [read, left.coefficients]

    return inputs, call


def write(draw: Callable[..., Tensor]) -> tuple[list[Tensor], Callable[..., Any]]:
    inputs = [draw(3, 2, None), *(draw(WIDTH) for _ in range(3))]
    return inputs, lambda coefficients, *updates: [ops.write(Live(updates, coefficients))]


def gate_logits(draw: Callable[..., Tensor]) -> tuple[list[Tensor], Callable[..., Any]]:
    own = gate(3, 2)
    return [draw(2, WIDTH)], lambda streams: [ops.gate_logits(streams, own, EPS)]


def depth_weights(draw: Callable[..., Tensor]) -> tuple[list[Tensor], Callable[..., Any]]:
    queries = torch.randn(2, 2, WIDTH)
    return [draw(2, WIDTH)] * 2, lambda *states: [ops.depth_weights(states, queries, route=route.DUAL, eps=EPS)]


def with_tokens(tokens: tuple[int, ...]) -> Callable[..., Tensor]:
    """Draws of (others, tokens, width), and of (others, tokens) where the last is None, the same numbers for each."""

    def draw(*shape: int | None) -> Tensor:
        *others, width = shape
        last = () if width is None else (width,)
        count = int(torch.tensor(tokens).prod()) if tokens else 1
        return torch.randn(*others, count, *last).view(*others, *tokens, *last)  # type: ignore[arg-type]

    return draw


def outcome(operator: Callable[..., Any], tokens: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients."""
    torch.manual_seed(0)
    inputs, call = operator(with_tokens(tokens))
    leaves = [x.requires_grad_() for x in inputs]
    results = list(call(*leaves))
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(call(*leaves), results, strict=True))
    given = [torch.ones_like(result).flatten().cumsum(0).view_as(result).to(result) / 64 for result in results]
    found = torch.autograd.grad(results, leaves, given, allow_unused=True)
    return results, [x for x in found if x is not None]


OPERATORS = [prefix, read, normed, gated_read, hyper_read, write]
ROWS = [
    *[("cpu", operator, shape) for operator in OPERATORS for shape in SHAPES],
    *[("reference", operator, shape) for operator in (*OPERATORS, gate_logits, depth_weights) for shape in SHAPES],
    *[("triton", operator, "image") for operator in OPERATORS],
    *[
        pytest.param("triton", operator, shape, marks=pytest.mark.slow)
        for operator in OPERATORS
        for shape in ("one", "no-images")
    ],
]


@pytest.mark.parametrize(("kind", "operator", "shape"), ROWS)
def test_operators(kind: str, operator: Callable[..., Any], shape: str, monkeypatch: Any):
    if kind == "triton":
        pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "FORCED", kind)
    tokens = SHAPES[shape]
    count = int(torch.tensor(tokens).prod()) if tokens else 1
    for found, flat in zip(outcome(operator, tokens), outcome(operator, (1, count)), strict=True):
        assert len(found) == len(flat)
        for ours, wanted in zip(found, flat, strict=True):
            assert ours.ndim == wanted.ndim - 2 + len(tokens)
            if kind == "reference":  # where a product of matrices may take another order for another shape
                assert torch.allclose(ours.flatten(), wanted.flatten(), 1e-4, 1e-5)
            else:
                assert torch.equal(ours.flatten(), wanted.flatten())


def stack_of(residual: str) -> ResidualStack:
    torch.manual_seed(0)
    maps = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]
    branches: list[nn.Module] = [
        NormedBranch(nn.RMSNorm(WIDTH, eps=1e-6), one) if i % 2 else one for i, one in enumerate(maps)
    ]
    stack = residual_stack(branches, WIDTH, RESIDUALS[residual])
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return stack


def step(stack: ResidualStack, tokens: tuple[int, ...]) -> list[Tensor]:
    count = int(torch.tensor(tokens).prod()) if tokens else 1
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1)).view(*tokens, WIDTH).requires_grad_()
    output = stack(x)
    assert output.shape == x.shape
    assert x.grad is None
    stack.zero_grad()
    output.square().sum().backward()
    assert x.grad is not None
    return [output.detach().flatten(), x.grad.flatten(), *(p.grad for p in stack.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernels", "equations"])
@pytest.mark.parametrize("residual", RESIDUALS)
def test_stacks(residual: str, dtype: torch.dtype):
    torch.set_default_dtype(dtype)
    try:
        stack = stack_of(residual)
        wanted = step(stack, (1, 12))
        for shape, tokens in SHAPES.items():
            found = step(stack, tokens)
            assert len(found) == len(wanted)
            if found[0].numel() == wanted[0].numel():
                # A product of matrices may take another order for another shape.
                assert all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(found, wanted, strict=True)), shape
            if 0 in tokens:
                assert all(not gradient.any() for gradient in found)
    finally:
        torch.set_default_dtype(torch.float32)


COMPILED = [
    pytest.param("dar-block", ("image", "none"), id="dar-block"),
    *[
        pytest.param(r, tuple(SHAPES), id=f"{r}-all", marks=pytest.mark.slow)
        for r in ("dar-block", "mhc-2", "attnres-full")
    ],
]


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(), torch._functorch.config.patch():  # what compile_blocks changes
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("residual", "shapes"), COMPILED)
def test_compiled_stacks(residual: str, shapes: tuple[str, ...]):
    stack = stack_of(residual)
    wanted = [step(stack, SHAPES[shape]) for shape in shapes]
    compile_blocks(stack, backend="aot_eager", fullgraph=True)
    for shape, eager in zip(shapes, wanted, strict=True):
        assert all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(step(stack, SHAPES[shape]), eager, strict=True))


@pytest.mark.usefixtures("fresh_compiler")
def test_wrong_shapes_are_refused_when_code_is_traced():
    traced = torch.compile(lambda u, c: torch.ops.dualres.write([u, u], c, None, 0), backend="eager", fullgraph=True)
    assert traced(torch.ones(3, WIDTH), torch.ones(2, 2, 3))[0].shape == (2, 3, WIDTH)
    with pytest.raises(Exception, match="do not fit 2 updates"):
        traced(torch.ones(3, WIDTH), torch.ones(2, 2, 4))
