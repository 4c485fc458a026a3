"""The fused operators as PyTorch operators: schema, shapes, gradient. `dispatch` picks the kernels that run them.

`run_*` checks its arguments and calls a kernel; the operator around it adds the gradient. An operator saves for the
backward pass what it was given (states, updates, parameters) and token-wise numbers, nothing else of a stream's size;
the backward kernels recompute the rest. Parameters arrive in float32, streams in the dtype they are stored in.
A backward operator returns the gradients of its tensors in the order of the arguments, absent ones left out.
"""
# B batch  T tokens  D width  J stored streams  O output streams  R history  U query sets  K updates

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dualres.ops import checks, dispatch
from dualres.ops.arguments import HYPER_READ, READ, HyperReadArguments, ReadArguments


def run_prefix(history: list[Tensor], queries: Tensor, key: list[int], value: list[int], eps: float) -> list[Tensor]:
    """`reference.prefix`, and what its backward needs.

    -> retrieved U × (O,B,T,D), log-partition U × (O,B,T), logits (R,U,O,B,T), inverse norms (R,J,B,T)
    """
    checks.prefix(history, queries, key, value, exact=True)
    return dispatch.kernels(queries).prefix(history, queries, key, value, eps)


prefix = torch.library.custom_op("dualres::prefix", run_prefix, mutates_args=())


@prefix.register_fake
def _(history: list[Tensor], queries: Tensor, key: list[int], value: list[int], eps: float) -> list[Tensor]:
    checks.prefix(history, queries, key, value, exact=True)
    state, (sets, outputs, width) = history[0], queries.shape
    tokens = state.shape[1:-1]
    retrieved = [state.new_empty(outputs, *tokens, width) for _ in range(sets)]
    log_partition = [queries.new_empty(outputs, *tokens) for _ in range(sets)]
    logits = queries.new_empty(len(history), sets, outputs, *tokens)
    return [*retrieved, *log_partition, logits, queries.new_empty(len(history), len(state), *tokens)]


@torch.library.custom_op("dualres::prefix_backward", mutates_args=())
def prefix_backward(
    d_retrieved: list[Tensor],
    d_log_partition: list[Tensor],
    history: list[Tensor],
    queries: Tensor,
    log_partition: list[Tensor],
    logits: Tensor,
    norms: Tensor,
    key: list[int],
    value: list[int],
) -> list[Tensor]:
    """The gradients of `prefix`. -> history R × (J,B,T,D), queries (U,O,D)"""
    given = (d_retrieved, d_log_partition, history, queries, log_partition, logits, norms, key, value)
    checks.prefix_backward(*given)
    return dispatch.kernels(queries).prefix_backward(*given)


@prefix_backward.register_fake
def _(*given: Any) -> list[Tensor]:
    checks.prefix_backward(*given)
    _, _, history, queries, *_ = given
    return [*(_like(state) for state in history), _like(queries)]


def _save_prefix(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    history, queries, ctx.key, ctx.value, _ = inputs
    ctx.states, ctx.sets = len(history), len(queries)
    ctx.save_for_backward(*history, queries, *output[ctx.sets :])


def _prefix_gradient(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    saved = iter(ctx.saved_tensors)
    history, queries = _take(saved, ctx.states), next(saved)
    log_partition, logits, norms = _take(saved, ctx.sets), next(saved), next(saved)
    d_retrieved = [gradient.contiguous() for gradient in gradients[: ctx.sets]]
    d_log_partition = [gradient.contiguous() for gradient in gradients[ctx.sets : 2 * ctx.sets]]
    key, value = list(ctx.key), list(ctx.value)
    found = prefix_backward(d_retrieved, d_log_partition, history, queries, log_partition, logits, norms, key, value)
    return found[:-1], found[-1], None, None, None


prefix.register_autograd(_prefix_gradient, setup_context=_save_prefix)


def run_read(*arguments: Any) -> tuple[Tensor, Tensor]:
    """`reference.gated_read`, and `reference.read` where there are no gates and so no coefficients to return.

    `ReadArguments` -> (B,T,D), (K+1,2,B,T) or (0,)
    """
    given = ReadArguments(*arguments)
    checks.read(given, exact=True)
    return dispatch.kernels(given.retrieved).read(given)


read = torch.library.custom_op("dualres::read", run_read, mutates_args=(), schema=f"({READ}) -> (Tensor, Tensor)")


@read.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    given = ReadArguments(*arguments)
    checks.read(given, exact=True)
    shape = (len(given.updates) + 1, *given.log_partition.shape) if given.gates else (0,)
    return given.retrieved.new_empty(given.retrieved.shape[1:]), given.log_partition.new_empty(shape)


@torch.library.custom_op(
    "dualres::read_backward", mutates_args=(), schema=f"(Tensor d_h, Tensor d_next_coefficients, {READ}) -> Tensor[]"
)
def read_backward(d_h: Tensor, d_next_coefficients: Tensor, *arguments: Any) -> list[Tensor]:
    """The gradients of `read`: of retrieved; with a live state of log-partition, updates, coefficients (only with
    gates: without they are constants) and query; of the gates; of the norm."""
    given = ReadArguments(*arguments)
    checks.read_backward(d_h, d_next_coefficients, given, exact=True)
    return dispatch.kernels(d_h).read_backward(d_h, d_next_coefficients, given)


@read_backward.register_fake
def _(d_h: Tensor, d_next_coefficients: Tensor, *arguments: Any) -> list[Tensor]:
    given = ReadArguments(*arguments)
    checks.read_backward(d_h, d_next_coefficients, given, exact=True)
    learned = given.coefficients if given.gates else None
    live = [given.log_partition, *given.updates, learned, given.query] if given.updates else []
    return [_like(tensor) for tensor in (given.retrieved, *live, *given.gates, given.norm) if tensor is not None]


def _save_read(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    given = ReadArguments(*inputs)
    ctx.updates, ctx.gates, ctx.numbers = len(given.updates), len(given.gates), given[7:]
    optional = given.coefficients, given.query, given.norm
    ctx.present = [tensor is not None for tensor in optional]
    present = [tensor for tensor in optional if tensor is not None]
    ctx.save_for_backward(given.retrieved, given.log_partition, *given.updates, *given.gates, *present)


def _read_gradient(ctx: Any, d_h: Tensor, d_next_coefficients: Tensor) -> tuple[Any, ...]:
    saved = iter(ctx.saved_tensors)
    retrieved, log_partition = next(saved), next(saved)
    updates, gates = _take(saved, ctx.updates), _take(saved, ctx.gates)
    coefficients, query, norm = (next(saved) if present else None for present in ctx.present)
    key, value, *eps = ctx.numbers
    given = (retrieved, log_partition, updates, coefficients, query, gates, norm, list(key), list(value), *eps)
    found = iter(read_backward(d_h.contiguous(), d_next_coefficients.contiguous(), *given))
    d_retrieved, d_log_partition, d_coefficients, d_query = next(found), None, None, None
    d_updates: list[Tensor] = []
    if updates:
        d_log_partition, d_updates = next(found), _take(found, ctx.updates)
        d_coefficients = next(found) if gates else None
        d_query = next(found)
    d_gates = _take(found, ctx.gates)
    d_norm = next(found) if norm is not None else None
    gradients = (d_retrieved, d_log_partition, d_updates, d_coefficients, d_query, d_gates, d_norm)
    return *gradients, None, None, None, None


read.register_autograd(_read_gradient, setup_context=_save_read)


def run_hyper_read(*arguments: Any) -> tuple[Tensor, Tensor]:
    """`reference.hyper_read`. `HyperReadArguments` -> (B,T,D), (K+1,J,B,T)"""
    given = HyperReadArguments(*arguments)
    checks.hyper_read(given, exact=True)
    return dispatch.kernels(given.coefficients).hyper_read(given)


hyper_read = torch.library.custom_op(
    "dualres::hyper_read", run_hyper_read, mutates_args=(), schema=f"({HYPER_READ}) -> (Tensor, Tensor)"
)


@hyper_read.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    checks.hyper_read(HyperReadArguments(*arguments), exact=True)
    updates, coefficients, *_ = arguments
    return _like(updates[0]), coefficients.new_empty(len(updates) + 1, *coefficients.shape[1:])


@torch.library.custom_op(
    "dualres::hyper_read_backward",
    mutates_args=(),
    schema=f"(Tensor d_h, Tensor d_next_coefficients, {HYPER_READ}) -> Tensor[]",
)
def hyper_read_backward(d_h: Tensor, d_next_coefficients: Tensor, *arguments: Any) -> list[Tensor]:
    """The gradients of `hyper_read`: of updates, coefficients, gates, norm."""
    given = HyperReadArguments(*arguments)
    checks.hyper_read_backward(d_h, d_next_coefficients, given, exact=True)
    return dispatch.kernels(d_h).hyper_read_backward(d_h, d_next_coefficients, given)


@hyper_read_backward.register_fake
def _(d_h: Tensor, d_next_coefficients: Tensor, *arguments: Any) -> list[Tensor]:
    checks.hyper_read_backward(d_h, d_next_coefficients, HyperReadArguments(*arguments), exact=True)
    updates, coefficients, gates, norm, *_ = arguments
    return [_like(tensor) for tensor in (*updates, coefficients, *gates, norm) if tensor is not None]


def _save_hyper_read(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    updates, coefficients, gates, norm, *ctx.numbers = inputs
    ctx.updates, ctx.gates, ctx.has_norm = len(updates), len(gates), norm is not None
    ctx.save_for_backward(*updates, coefficients, *gates, *([norm] if ctx.has_norm else []))


def _hyper_read_gradient(ctx: Any, d_h: Tensor, d_next_coefficients: Tensor) -> tuple[Any, ...]:
    saved = iter(ctx.saved_tensors)
    updates, coefficients, gates = _take(saved, ctx.updates), next(saved), _take(saved, ctx.gates)
    given = (updates, coefficients, gates, next(saved) if ctx.has_norm else None, *ctx.numbers)
    found = iter(hyper_read_backward(d_h.contiguous(), d_next_coefficients.contiguous(), *given))
    d_updates, d_coefficients, d_gates = _take(found, ctx.updates), next(found), _take(found, ctx.gates)
    return d_updates, d_coefficients, d_gates, next(found) if ctx.has_norm else None, None, None, None


hyper_read.register_autograd(_hyper_read_gradient, setup_context=_save_hyper_read)


def run_write(updates: list[Tensor], coefficients: Tensor) -> Tensor:
    """`reference.write`. -> (J,B,T,D)"""
    checks.write(updates, coefficients, exact=True)
    return dispatch.kernels(coefficients).write(updates, coefficients)


write = torch.library.custom_op("dualres::write", run_write, mutates_args=())


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


def _save_write(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    updates, coefficients = inputs
    ctx.learned = coefficients.requires_grad
    ctx.save_for_backward(*(updates if ctx.learned else ()), coefficients)


def _write_gradient(ctx: Any, d_live: Tensor) -> tuple[Any, ...]:
    *updates, coefficients = ctx.saved_tensors
    found = write_backward(d_live.contiguous(), updates, coefficients)
    return found[: len(coefficients)], found[-1] if ctx.learned else None


write.register_autograd(_write_gradient, setup_context=_save_write)


def _take(tensors: Iterator[Tensor], count: int) -> list[Tensor]:
    return [next(tensors) for _ in range(count)]


def _like(tensor: Tensor) -> Tensor:
    """A new contiguous tensor of the same shape, dtype and device."""
    return tensor.new_empty(tensor.shape)
