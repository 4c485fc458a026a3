"""The Triton kernels, counted in the interpreter: what they move, that no two programs collide, that runs repeat."""
# ruff: noqa: N803
# mypy: disable-error-code="import-untyped, untyped-decorator"

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from dualres.ops import Norm, dispatch
from dualres.ops import traffic as account
from dualres.residual.dar import Dual
from dualres.residual.pathway import Place
from tests.ops.meter import Inputs, Meter, Traffic, prepared, round_to_nearest, traffic

ODD = (2, 37, 123)  # B, T, D; more tokens than one program takes
# op, sizes -> loads and stores of streams, in units of D per token
PER_OP: dict[str, tuple[str, dict[str, Any], Traffic]] = {
    "dar prefix": ("prefix", {"states": 5, "sets": 2, "outputs": 2}, Traffic(10, 4)),
    "dar prefix, 4 sets": ("prefix", {"states": 3, "sets": 4, "outputs": 2}, Traffic(6, 8)),
    "attnres prefix": ("prefix", {"states": 5, "sets": 1, "outputs": 1}, Traffic(5, 1)),
    "dar prefix backward": ("prefix_backward", {"states": 5, "sets": 2, "outputs": 2}, Traffic(28, 10)),
    "dar prefix backward, read later": (
        *("prefix_backward", {"states": 5, "sets": 2, "outputs": 2, "later": ("carried",)}),
        Traffic(38, 10),
    ),
    "dar prefix backward, one state": (
        *("prefix_backward", {"states": 1, "sets": 2, "outputs": 2, "later": ("carried",)}),
        Traffic(8, 2),
    ),
    "attnres prefix backward": ("prefix_backward", {"states": 5, "sets": 1, "outputs": 1}, Traffic(12, 5)),
    "dar first read": ("read", {"updates": 0, "outputs": 2}, Traffic(2, 1)),
    "dar read": ("read", {"updates": 3, "outputs": 2}, Traffic(5, 1)),
    "attnres read": ("read", {"updates": 3, "outputs": 1}, Traffic(4, 1)),
    "dar first read backward": ("read_backward", {"updates": 0, "outputs": 2}, Traffic(3, 2)),
    "dar first read backward, retrieved later": (
        *("read_backward", {"updates": 0, "outputs": 2, "later": ("retrieved",)}),
        Traffic(5, 2),
    ),
    "dar read backward": ("read_backward", {"updates": 3, "outputs": 2}, Traffic(9, 5)),
    "dar read backward, chained": (
        *("read_backward", {"updates": 3, "outputs": 2, "carried": 2, "later": ("live", "retrieved")}),
        Traffic(10, 5),
    ),
    "dar read backward, live later": (
        *("read_backward", {"updates": 5, "outputs": 2, "carried": 3, "later": ("live",)}),
        Traffic(12, 6),
    ),
    "dar read backward, all carried": (
        *("read_backward", {"updates": 2, "outputs": 2, "carried": 2, "later": ("live", "retrieved")}),
        Traffic(9, 4),
    ),
    "attnres read backward": ("read_backward", {"updates": 3, "outputs": 1}, Traffic(5, 4)),
    "attnres read backward, chained": (
        *("read_backward", {"updates": 3, "outputs": 1, "carried": 2, "later": ("live", "retrieved")}),
        Traffic(7, 3),
    ),
    "mhc read": ("hyper_read", {"updates": 5, "streams": 4}, Traffic(10, 1)),
    "mhc read, 3 streams": ("hyper_read", {"updates": 3, "streams": 3}, Traffic(6, 1)),
    "mhc read backward": ("hyper_read_backward", {"updates": 5, "streams": 4}, Traffic(27, 5)),
    "mhc read backward, chained": (
        *("hyper_read_backward", {"updates": 5, "streams": 4, "carried": 4, "later": ("live",)}),
        Traffic(31, 5),
    ),
    "mhc read backward, all carried": (
        *("hyper_read_backward", {"updates": 3, "streams": 3, "carried": 3, "later": ("live",)}),
        Traffic(21, 3),
    ),
    "write": ("write", {"updates": 4, "streams": 2}, Traffic(4, 2)),
    "write backward": ("write_backward", {"updates": 4, "streams": 2}, Traffic(6, 4)),
    "write backward, carried": ("write_backward", {"updates": 4, "streams": 2, "carried": 3}, Traffic(3, 1)),
    "write backward, constant": ("write_backward", {"updates": 4, "streams": 2, "learned": False}, Traffic(2, 4)),
}


@triton.jit
def everyone_writes(x, COUNT: tl.constexpr):
    tl.store(x + tl.arange(0, COUNT), tl.zeros([COUNT], tl.float32))


@triton.jit
def cast(x, y, COUNT: tl.constexpr):
    tl.store(y + tl.arange(0, COUNT), tl.load(x + tl.arange(0, COUNT)).to(tl.bfloat16))


@pytest.mark.parametrize(("op", "sizes", "expected"), PER_OP.values(), ids=PER_OP)
def test_traffic_of_each_op(op: str, sizes: dict[str, Any], expected: Traffic):
    """Also that lanes stay inside the tensors and programs out of each other's way: the meter asserts it."""
    assert traffic(op, ODD, **sizes) == expected


@pytest.mark.parametrize(("outputs", "sets"), [(2, 2), (2, 4), (1, 1)])
def test_prefix_loads_every_element_of_the_history_once(outputs: int, sets: int):
    call = prepared("prefix", Inputs(ODD), states=4, sets=sets, outputs=outputs)
    with Meter(ODD) as meter:
        call()
    assert all((meter.loads_of(state) == 1).all() for state in call.args[0].history)


@pytest.mark.parametrize(("pairs", "width"), [(4, 4096), (8, 2048)])
def test_one_pass_serves_all_queries_of_wide_rows(pairs: int, width: int):
    assert traffic("prefix", (1, 1, width), states=2, sets=pairs // 2, outputs=2) == Traffic(4, pairs)


@pytest.mark.parametrize(("op", "sizes", "expected"), PER_OP.values(), ids=PER_OP)
def test_the_account_is_what_the_meter_counts(op: str, sizes: dict[str, Any], expected: Traffic):
    """`dualres describe` goes by these formulas."""
    *incoming, packed, _ = prepared(op, Inputs(ODD), **sizes).args
    arguments = [*incoming, *packed]
    moved = account.BY_OPERATOR[f"dualres::{op}"](*arguments)
    assert tuple(moved) == tuple(expected)


@pytest.mark.parametrize("row", ["dar first read backward", "dar read backward, chained", "attnres read backward"])
def test_wide_rows_get_the_gradients_of_their_weights_in_a_second_pass(row: str, monkeypatch: Any):
    op, sizes, expected = PER_OP[row]
    rows = 1 + sizes["outputs"] + sizes["updates"]
    in_one_pass = seeded(op, sizes, torch.float32)
    monkeypatch.setattr(account, "ONE_PASS", {True: 0, False: 0})
    call = prepared(op, Inputs(ODD), **sizes)
    with Meter(ODD) as meter:
        call()
    *incoming, saved, _ = call.args
    assert meter.traffic() == (expected.loads + rows, expected.stores) == account.read_backward(*incoming, *saved)
    for one, two in zip(in_one_pass, seeded(op, sizes, torch.float32), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


@pytest.mark.axes(states=5, branches=4, shared=True)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("branches", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("states", [1, 2, 5, 9])
def test_a_block_stays_within_its_budget(states: int, branches: int, shared: bool, monkeypatch: Any):
    """Open to close, by the real pathway: 8d per branch, and its share of the prefix, (2R + 2U)d / S for U sets."""
    monkeypatch.setattr(dispatch, "FORCED", "triton")
    shape = (1, 5, 24)
    used = tuple(i % 2 if shared else i for i in range(branches))
    pathway = Dual(shape[-1], Place(states, used), eps=1e-6, gate_scale=1.0, rho_bias=2.0)
    history = tuple(torch.randn(2, *shape) for _ in range(states))
    with torch.no_grad(), Meter(shape) as meter:
        state = pathway.open(history)
        for i in range(branches):
            h, state = pathway.read(state, i, Norm(torch.ones(shape[-1]), 1e-6))
            state = pathway.write(state, i, h)
        pathway.close(state)
    assert meter.traffic().total / branches <= 8 + (2 * states + 2 * len(set(used))) / branches


@pytest.mark.slow
@pytest.mark.parametrize(("op", "sizes"), [row[:2] for row in PER_OP.values()], ids=PER_OP)
def test_runs_repeat_bit_by_bit(op: str, sizes: dict[str, Any]):
    round_to_nearest()
    first, second = seeded(op, sizes), seeded(op, sizes)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.isfinite(x).all() for x in first)


def test_the_meter_sees_a_collision_and_a_stray_lane():
    x = torch.zeros(64)
    with Meter(ODD), pytest.raises(Exception, match="two programs write one element"):
        everyone_writes[(2,)](x, 64)
    with Meter(ODD), pytest.raises(Exception, match="64 lanes are outside of every tensor"):
        everyone_writes[(1,)](x, 128)


def test_round_to_nearest_is_what_torch_rounds_to():
    round_to_nearest()
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    y = torch.empty(64, dtype=torch.bfloat16)
    cast[(1,)](x, y, 64)
    assert torch.equal(y, x.bfloat16())


def seeded(op: str, sizes: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    call = prepared(op, Inputs((1, 80, 40), dtype), **sizes)
    call()
    found = [x for value in call.args[-1] for x in (value if isinstance(value, list) else [value])]
    return [x for x in found if x is not None]
