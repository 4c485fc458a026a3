"""The fused operators as PyTorch operators: schema, shapes, gradient. `dispatch` picks the kernels that run them.

They keep for the backward pass what they were given (states, updates, parameters) and token-wise numbers, nothing of a
stream's size; their kernels compute the rest again. Parameters arrive in float32, streams in the dtype they are stored
in. A backward operator returns the gradients of its tensors in the order of the arguments, absent ones left out.
"""
# B batch  T tokens  D width  J stored streams  O output streams  R history  U query sets  K updates

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dualres.ops import checks, dispatch
from dualres.ops.inputs import HYPER_READ, READ, HyperInputs, ReadInputs


@torch.library.custom_op("dualres::prefix", mutates_args=())
def prefix(history: list[Tensor], queries: Tensor, key: list[int], value: list[int], eps: float) -> list[Tensor]:
    """`reference.prefix`, and what its backward needs.

    -> retrieved U × (O,B,T,D), log-partition U × (O,B,T), logits (R,U,O,B,T), inverse norms (R,J,B,T)
    """
    return run_prefix(history, queries, key, value, eps)


def run_prefix(history: list[Tensor], queries: Tensor, key: list[int], value: list[int], eps: float) -> list[Tensor]:
    """The kernel of `prefix` by itself, without a gradient."""
    checks.prefix(history, queries, key, value, exact=True)
    return dispatch.kernels(queries).prefix(history, queries, key, value, eps)


@prefix.register_fake
def _(history: list[Tensor], queries: Tensor, key: list[int], value: list[int], eps: float) -> list[Tensor]:
    checks.prefix(history, queries, key, value, exact=True)
    state, (sets, outputs, width) = history[0], queries.shape
    tokens = state.shape[1:-1]
    retrieved = [state.new_empty(outputs, *tokens, width) for _ in range(sets)]
    partition = [queries.new_empty(outputs, *tokens) for _ in range(sets)]
    logits = queries.new_empty(len(history), sets, outputs, *tokens)
    return [*retrieved, *partition, logits, queries.new_empty(len(history), len(state), *tokens)]


@torch.library.custom_op("dualres::prefix_backward", mutates_args=())
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
    """The gradients of `prefix`. -> history R × (J,B,T,D), queries (U,O,D)"""
    given = (d_retrieved, d_partition, history, queries, partition, logits, norms, key, value)
    checks.prefix_backward(*given, exact=True)
    return dispatch.kernels(queries).prefix_backward(*given)


@prefix_backward.register_fake
def _(
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
    checks.prefix_backward(d_retrieved, d_partition, history, queries, partition, logits, norms, key, value, exact=True)
    return [*(_like(state) for state in history), _like(queries)]


def _keep_prefix(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    history, queries, ctx.key, ctx.value, _ = inputs
    ctx.states, ctx.sets = len(history), len(queries)
    ctx.save_for_backward(*history, queries, *output[ctx.sets :])


def _prefix_gradient(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    kept = iter(ctx.saved_tensors)
    history, queries = _take(kept, ctx.states), next(kept)
    partition, logits, norms = _take(kept, ctx.sets), next(kept), next(kept)
    d_retrieved = [gradient.contiguous() for gradient in gradients[: ctx.sets]]
    d_partition = [gradient.contiguous() for gradient in gradients[ctx.sets : 2 * ctx.sets]]
    found = prefix_backward(
        d_retrieved, d_partition, history, queries, partition, logits, norms, list(ctx.key), list(ctx.value)
    )
    return found[:-1], found[-1], None, None, None


prefix.register_autograd(_prefix_gradient, setup_context=_keep_prefix)


@torch.library.custom_op("dualres::read", mutates_args=(), schema=f"({READ}) -> (Tensor, Tensor)")
def read(*inputs: Any) -> tuple[Tensor, Tensor]:
    """`reference.gated_read`, and `reference.read` where there are no gates and so no coefficients to return.

    `ReadInputs` -> (B,T,D), (K+1,2,B,T) or (0,)
    """
    return run_read(ReadInputs(*inputs))


def run_read(given: ReadInputs) -> tuple[Tensor, Tensor]:
    """The kernel of `read` by itself, without a gradient."""
    checks.read(given, exact=True)
    return dispatch.kernels(given.retrieved).read(given)


@read.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    given = ReadInputs(*inputs)
    checks.read(given, exact=True)
    partition = given.partition
    left = partition.new_empty(len(given.updates) + 1, *partition.shape) if given.gates else partition.new_empty(0)
    return given.retrieved.new_empty(given.retrieved.shape[1:]), left


@torch.library.custom_op(
    "dualres::read_backward", mutates_args=(), schema=f"(Tensor d_h, Tensor d_left, {READ}) -> Tensor[]"
)
def read_backward(d_h: Tensor, d_left: Tensor, *inputs: Any) -> list[Tensor]:
    """The gradients of `read`: of retrieved; with a live state of partition, updates, coefficients (only with gates:
    without they are constants) and queries; of the gates; of the norm."""
    given = ReadInputs(*inputs)
    checks.read_backward(d_h, d_left, given, exact=True)
    return dispatch.kernels(d_h).read_backward(d_h, d_left, given)


@read_backward.register_fake
def _(d_h: Tensor, d_left: Tensor, *inputs: Any) -> list[Tensor]:
    given = ReadInputs(*inputs)
    checks.read_backward(d_h, d_left, given, exact=True)
    learned = given.coefficients if given.gates else None
    live = [given.partition, *given.updates, learned, given.queries] if given.updates else []
    return [_like(tensor) for tensor in (given.retrieved, *live, *given.gates, given.norm) if tensor is not None]


def _keep_read(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    given = ReadInputs(*inputs)
    ctx.updates, ctx.gates, ctx.numbers = len(given.updates), len(given.gates), given[7:]
    optional = given.coefficients, given.queries, given.norm
    ctx.present = [tensor is not None for tensor in optional]
    present = [tensor for tensor in optional if tensor is not None]
    ctx.save_for_backward(given.retrieved, given.partition, *given.updates, *given.gates, *present)


def _read_gradient(ctx: Any, d_h: Tensor, d_left: Tensor) -> tuple[Any, ...]:
    kept = iter(ctx.saved_tensors)
    retrieved, partition = next(kept), next(kept)
    updates, gates = _take(kept, ctx.updates), _take(kept, ctx.gates)
    coefficients, queries, norm = (next(kept) if present else None for present in ctx.present)
    key, value, eps, norm_eps = ctx.numbers
    given = ReadInputs(
        retrieved, partition, updates, coefficients, queries, gates, norm, list(key), list(value), eps, norm_eps
    )
    found = iter(read_backward(d_h.contiguous(), d_left.contiguous(), *given))
    d_retrieved, d_partition, d_coefficients, d_queries = next(found), None, None, None
    d_updates: list[Tensor] = []
    if updates:
        d_partition, d_updates = next(found), _take(found, ctx.updates)
        d_coefficients = next(found) if gates else None
        d_queries = next(found)
    d_gates = _take(found, ctx.gates)
    d_norm = next(found) if norm is not None else None
    gradients = (d_retrieved, d_partition, d_updates, d_coefficients, d_queries, d_gates, d_norm)
    return *gradients, None, None, None, None


read.register_autograd(_read_gradient, setup_context=_keep_read)


@torch.library.custom_op("dualres::hyper_read", mutates_args=(), schema=f"({HYPER_READ}) -> (Tensor, Tensor)")
def hyper_read(*inputs: Any) -> tuple[Tensor, Tensor]:
    """`reference.hyper_read`. `HyperInputs` -> (B,T,D), (K+1,J,B,T)"""
    return run_hyper_read(HyperInputs(*inputs))


def run_hyper_read(given: HyperInputs) -> tuple[Tensor, Tensor]:
    """The kernel of `hyper_read` by itself, without a gradient."""
    checks.hyper_read(given, exact=True)
    return dispatch.kernels(given.coefficients).hyper_read(given)


@hyper_read.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    checks.hyper_read(HyperInputs(*inputs), exact=True)
    updates, coefficients, *_ = inputs
    return _like(updates[0]), coefficients.new_empty(len(updates) + 1, *coefficients.shape[1:])


@torch.library.custom_op(
    "dualres::hyper_read_backward", mutates_args=(), schema=f"(Tensor d_h, Tensor d_left, {HYPER_READ}) -> Tensor[]"
)
def hyper_read_backward(d_h: Tensor, d_left: Tensor, *inputs: Any) -> list[Tensor]:
    """The gradients of `hyper_read`: of updates, coefficients, gates, norm."""
    given = HyperInputs(*inputs)
    checks.hyper_read_backward(d_h, d_left, given, exact=True)
    return dispatch.kernels(d_h).hyper_read_backward(d_h, d_left, given)


@hyper_read_backward.register_fake
def _(d_h: Tensor, d_left: Tensor, *inputs: Any) -> list[Tensor]:
    checks.hyper_read_backward(d_h, d_left, HyperInputs(*inputs), exact=True)
    updates, coefficients, gates, norm, *_ = inputs
    return [_like(tensor) for tensor in (*updates, coefficients, *gates, norm) if tensor is not None]


def _keep_hyper_read(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    updates, coefficients, gates, norm, *ctx.numbers = inputs
    ctx.updates, ctx.gates, ctx.normed = len(updates), len(gates), norm is not None
    ctx.save_for_backward(*updates, coefficients, *gates, *([norm] if ctx.normed else []))


def _hyper_read_gradient(ctx: Any, d_h: Tensor, d_left: Tensor) -> tuple[Any, ...]:
    kept = iter(ctx.saved_tensors)
    updates, coefficients, gates = _take(kept, ctx.updates), next(kept), _take(kept, ctx.gates)
    norm = next(kept) if ctx.normed else None
    found = iter(
        hyper_read_backward(d_h.contiguous(), d_left.contiguous(), updates, coefficients, gates, norm, *ctx.numbers)
    )
    d_updates, d_coefficients, d_gates = _take(found, ctx.updates), next(found), _take(found, ctx.gates)
    return d_updates, d_coefficients, d_gates, next(found) if ctx.normed else None, None, None, None


hyper_read.register_autograd(_hyper_read_gradient, setup_context=_keep_hyper_read)


@torch.library.custom_op("dualres::write", mutates_args=())
def write(updates: list[Tensor], coefficients: Tensor) -> Tensor:
    """`reference.write`. -> (J,B,T,D)"""
    return run_write(updates, coefficients)


def run_write(updates: list[Tensor], coefficients: Tensor) -> Tensor:
    """The kernel of `write` by itself, without a gradient."""
    checks.write(updates, coefficients, exact=True)
    return dispatch.kernels(coefficients).write(updates, coefficients)


@write.register_fake
def _(updates: list[Tensor], coefficients: Tensor) -> Tensor:
    checks.write(updates, coefficients, exact=True)
    return updates[0].new_empty(coefficients.shape[1], *updates[0].shape)


@torch.library.custom_op("dualres::write_backward", mutates_args=())
def write_backward(d_live: Tensor, updates: list[Tensor], coefficients: Tensor) -> list[Tensor]:
    """The gradients of `write`: of updates and, if those are given, of coefficients."""
    checks.write_backward(d_live, updates, coefficients, exact=True)
    return dispatch.kernels(coefficients).write_backward(d_live, updates, coefficients)


@write_backward.register_fake
def _(d_live: Tensor, updates: list[Tensor], coefficients: Tensor) -> list[Tensor]:
    checks.write_backward(d_live, updates, coefficients, exact=True)
    d_updates = [_like(d_live[0]) for _ in coefficients]
    return [*d_updates, *([_like(coefficients)] if updates else [])]


def _keep_write(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    updates, coefficients = inputs
    ctx.learned = coefficients.requires_grad
    ctx.save_for_backward(*(updates if ctx.learned else ()), coefficients)


def _write_gradient(ctx: Any, d_live: Tensor) -> tuple[Any, ...]:
    *updates, coefficients = ctx.saved_tensors
    found = write_backward(d_live.contiguous(), updates, coefficients)
    return found[: len(coefficients)], found[-1] if ctx.learned else None


write.register_autograd(_write_gradient, setup_context=_keep_write)


def _take(tensors: Iterator[Tensor], count: int) -> list[Tensor]:
    """The next `count` of them."""
    return [next(tensors) for _ in range(count)]


def _like(tensor: Tensor) -> Tensor:
    """A new tensor of the same kind, contiguous."""
    return tensor.new_empty(tensor.shape)
