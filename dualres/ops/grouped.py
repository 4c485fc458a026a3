"""Rows times the weight of their group: PyTorch's grouped matrix product as an operator that `torch.compile` can trace.

`torch.nn.functional.grouped_mm` runs in float32, bfloat16 and float16, but PyTorch 2.13 traces it in bfloat16 only.
"""
# M rows  E groups  D input width  F output width

import functools

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from dualres.ops import checks
from dualres.ops.dispatch import NAMESPACE


@torch.library.custom_op(f"{NAMESPACE}::grouped_linear", mutates_args=())
def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """The first counts[0] rows times weight_0ᵀ, the next counts[1] times weight_1ᵀ, … (M,D), (E,F,D), (E,) -> (M,F)"""
    checks.grouped_linear("weight", rows, weight, counts)
    checks.group_sizes(rows, counts)
    if rows.dtype == torch.float64:  # not supported by `grouped_mm`
        runs = rows.split(counts.tolist())
        return torch.cat([run @ w.T for run, w in zip(runs, weight, strict=True)])
    return grouped_mm(rows, weight.mT, offs=_ends(counts))


@grouped_linear.register_fake
def _(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    checks.grouped_linear("weight", rows, weight, counts)
    return rows.new_empty(rows.shape[0], weight.shape[1])


@torch.library.custom_op(f"{NAMESPACE}::grouped_linear_weight_gradient", mutates_args=())
def weight_gradient(gradient: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """For each group, its rows of the gradient, transposed, times its rows. (M,F), (M,D), (E,) -> (E,F,D)"""
    checks.grouped_linear("gradient", rows, gradient, counts)
    checks.group_sizes(rows, counts)
    if rows.dtype == torch.float64:
        pairs = zip(gradient.split(counts.tolist()), rows.split(counts.tolist()), strict=True)
        return torch.stack([g.T @ r for g, r in pairs])
    return grouped_mm(gradient.mT, rows, offs=_ends(counts))


@weight_gradient.register_fake
def _(gradient: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    checks.grouped_linear("gradient", rows, gradient, counts)
    return rows.new_empty(counts.shape[0], gradient.shape[1], rows.shape[1])


def _ends(counts: Tensor) -> Tensor:
    """The end of each group's rows. (E,) -> (E,)"""
    return counts.cumsum(0).to(torch.int32)


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weight, counts = ctx.saved_tensors  # type: ignore[attr-defined]
    gradient = gradient.contiguous()
    return grouped_linear(gradient, weight.mT, counts), weight_gradient(gradient, rows, counts), None


grouped_linear.register_autograd(_backward, setup_context=_save)
OPERATORS = getattr(torch.ops, NAMESPACE)


@functools.cache
def register_flop_formulas() -> None:
    """Let PyTorch's `FlopCounterMode` count both operators; called only for models with experts: it imports triton."""
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula([OPERATORS.grouped_linear, OPERATORS.grouped_linear_weight_gradient])(_flops)


def _flops(first: torch.Size, second: torch.Size, counts: torch.Size, out_shape: torch.Size, **_: object) -> int:
    """A multiplication and an addition for each row and each entry of its group's weight (F,D).

    rows (M,D), weight (E,F,D), or a gradient (M,F), rows (M,D)
    """
    return 2 * first.numel() * second[1]
