"""The grouped product against one product per group, forward and backward, and as an operator of PyTorch."""

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from dualres.ops import grouped_linear
from dualres.ops.grouped import register_flop_formulas
from tests.small import relative_error

COUNTS = {
    "uneven": [3, 0, 7, 1],
    "all to one": [0, 11, 0, 0],
    "first and last": [5, 0, 0, 6],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", COUNTS)
def test_equals_one_product_per_group(name: str, dtype: torch.dtype):
    counts = torch.tensor(COUNTS[name])
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(11, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(4, 24, 16, generator=generator).to(dtype).requires_grad_()
    upstream = torch.randn(11, 24, generator=generator).to(dtype)
    product = grouped_linear(rows, weight, counts)
    product.backward(upstream)

    exact_rows, exact_weight = (x.detach().double().requires_grad_() for x in (rows, weight))
    runs = exact_rows.split(COUNTS[name])
    wanted = torch.cat([run @ w.T for run, w in zip(runs, exact_weight, strict=True)])
    wanted.backward(upstream.double())
    rounding = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]
    for ours, exact in ((product, wanted), (rows.grad, exact_rows.grad), (weight.grad, exact_weight.grad)):
        assert ours is not None
        assert exact is not None
        assert ours.dtype == dtype
        assert relative_error(ours, exact) < rounding


def test_gradients():
    rows = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 5, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda r, w: grouped_linear(r, w, torch.tensor([2, 0, 4])), (rows, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_is_a_proper_operator(dtype: torch.dtype):
    rows = torch.randn(6, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, 16, 8, dtype=dtype, requires_grad=True)
    opcheck(grouped_linear, (rows, weight, torch.tensor([2, 0, 4])))


def test_flops_are_counted():
    """Forward, and two products of the same size backward."""
    register_flop_formulas()
    rows, weight = torch.randn(6, 8, requires_grad=True), torch.randn(3, 16, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        grouped_linear(rows, weight, torch.tensor([2, 0, 4])).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 6 * 16 * 8
