"""The operators of the pathways, and the experts' product: fused kernels where the device has them, else equations."""
# B batch  T tokens  D width  J stored streams  O output streams  R history  U query sets  K updates

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from dualres.ops import autograd, checks, dispatch, grouped, reference
from dualres.ops.inputs import HyperInputs, ReadInputs
from dualres.ops.reference import GateParameters, Norm, Route, wide

__all__ = [
    "GateParameters",
    "Norm",
    "depth_weights",
    "gate_logits",
    "gated_read",
    "grouped_linear",
    "hyper_read",
    "normed",
    "prefix",
    "read",
    "write",
]

Op = TypeVar("Op", bound=Callable[..., object])


def full_precision(op: Op) -> Op:
    """`op` with autocast off: depth scores and gates are float32 also inside a bfloat16 autocast region."""

    @functools.wraps(op)
    def call(*args: object) -> object:
        first = args[0]
        if not isinstance(first, Tensor) and len(cast(tuple[Tensor, ...], first)) == 0:
            raise ValueError(f"{op.__code__.co_varnames[0]}: there is no tensor, give at least one")
        device = (first if isinstance(first, Tensor) else cast(tuple[Tensor, ...], first)[0]).device.type
        if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
            return op(*args)
        with torch.autocast(device, enabled=False):
            return op(*args)

    return cast(Op, call)


@full_precision
def prefix(
    history: Sequence[Tensor], queries: Tensor, route: Route, eps: float
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Phase 1, once per block: what the history alone gives every query set, and its log-partition.

    history R × (J,B,T,D), queries (U,O,D) -> retrieved U × (O,B,T,D), log-partition U × (O,B,T)
    """
    if dispatch.kind(history[0]) == "reference":
        checks.prefix(history, queries, *route, exact=False)
        return reference.prefix(history, queries, route, eps)
    run = autograd.prefix if _recorded(history[0]) else autograd.run_prefix
    found = run(_contiguous(history), _parameter(queries), list(route[0]), list(route[1]), eps)
    return tuple(found[: len(queries)]), tuple(found[len(queries) : 2 * len(queries)])


@full_precision
def read(
    retrieved: Tensor,
    log_partition: Tensor,
    updates: Sequence[Tensor],
    coefficients: Tensor | None,
    queries: Tensor | None,
    route: Route,
    eps: float,
    norm: Norm | None,
) -> Tensor:
    """Phase 2 without gates: the history merged with the live state, then the branch's norm if it is given.

    retrieved (1,B,T,D), log_partition (1,B,T), updates K × (B,T,D), coefficients (K,J,B,T), queries (1,D) -> (B,T,D)
    """
    if not updates and norm is None:
        return retrieved.squeeze(0)
    if coefficients is not None and coefficients.requires_grad:
        raise ValueError("a read without gates takes its coefficients for constants, and these require a gradient")
    given = _read_inputs(retrieved, log_partition, updates, coefficients, queries, (), route, eps, norm)
    if dispatch.kind(retrieved) == "reference":
        checks.read(given, exact=False)
        return reference.read(retrieved, log_partition, updates, coefficients, queries, route, eps, norm)
    return _read(given)[0]


@full_precision
def normed(stream: Tensor, norm: Norm | None) -> Tensor:
    """A read of one stream and nothing else, then the branch's norm if it is given. (1,B,T,D) -> (B,T,D)"""
    if norm is None:
        return stream.squeeze(0)
    if dispatch.kind(stream) == "reference":
        checks.normed(stream, norm.weight)
        return reference.normed(wide(stream.squeeze(0)), norm).to(stream.dtype)
    nothing = stream.new_empty(stream.shape[:-1], dtype=torch.float32)
    return read(stream, nothing, (), None, None, ((0,), (0,)), 0.0, norm)


@full_precision
def gated_read(
    retrieved: Tensor,
    log_partition: Tensor,
    updates: Sequence[Tensor],
    coefficients: Tensor | None,
    queries: Tensor | None,
    gates: Sequence[GateParameters],
    route: Route,
    eps: float,
    norm: Norm | None,
) -> tuple[Tensor, Tensor]:
    """Phase 2 of DAR: the branch input h = α⁰h⁰ + α¹h¹, and the coefficients [M(ρ) C, β] that the write leaves.

    retrieved (2,B,T,D), log_partition (2,B,T), updates K × (B,T,D), coefficients (K,2,B,T), queries (2,D), gates α, β
    and with a live state ρ -> (B,T,D), (K+1,2,B,T)
    """
    given = _read_inputs(retrieved, log_partition, updates, coefficients, queries, gates, route, eps, norm)
    if dispatch.kind(retrieved) == "reference":
        checks.read(given, exact=False)
        return reference.gated_read(retrieved, log_partition, updates, coefficients, queries, gates, route, eps, norm)
    return _read(given)


@full_precision
def hyper_read(
    updates: Sequence[Tensor],
    coefficients: Tensor,
    gates: Sequence[GateParameters],
    steps: int,
    eps: float,
    norm: Norm | None,
) -> tuple[Tensor, Tensor]:
    """The branch input of mHC, Σ_j H_pre^j X^j, and the coefficients [H_res C, H_post] that the write leaves.

    updates K × (B,T,D), coefficients (K,J,B,T), gates H_pre, H_post, H_res -> (B,T,D), (K+1,J,B,T)
    """
    flat = [parameter for gate in gates for parameter in gate]
    weight, norm_eps = (None, 0.0) if norm is None else norm
    if dispatch.kind(updates[0]) == "reference":
        checks.hyper_read(HyperInputs(list(updates), coefficients, flat, weight, steps, eps, norm_eps), exact=False)
        return reference.hyper_read(updates, coefficients, gates, steps, eps, norm)
    given = HyperInputs(
        _contiguous(updates),
        _parameter(coefficients),
        [_parameter(parameter) for parameter in flat],
        None if weight is None else _parameter(weight),
        steps,
        eps,
        norm_eps,
    )
    return autograd.hyper_read(*given) if _recorded(updates[0]) else autograd.run_hyper_read(given)


@full_precision
def write(updates: Sequence[Tensor], coefficients: Tensor) -> Tensor:
    """The live streams P^j = Σ_k C_k^j u_k as a state. updates K × (B,T,D), coefficients (K,J,B,T) -> (J,B,T,D)"""
    if dispatch.kind(updates[0]) == "reference":
        checks.write(updates, coefficients, exact=False)
        return reference.write(updates, coefficients)
    run = autograd.write if _recorded(updates[0]) else autograd.run_write
    return run(_contiguous(updates), _parameter(coefficients))


@full_precision
def depth_weights(candidates: Sequence[Tensor], queries: Tensor, route: Route, eps: float) -> Tensor:
    """`reference.depth_weights`."""
    checks.prefix(candidates, queries, *route, exact=False, name="candidates")
    return reference.depth_weights(candidates, queries, route, eps)


@full_precision
def gate_logits(streams: Tensor, gate: GateParameters, eps: float) -> Tensor:
    """`reference.gate_logits`."""
    checks.gate_logits(streams, gate)
    return reference.gate_logits(streams, gate, eps)


grouped_linear = grouped.grouped_linear


def _recorded(tensor: Tensor) -> bool:
    """Whether there may be a gradient or a graph to record; kernels are called directly where there is neither."""
    return torch.is_grad_enabled() or torch.compiler.is_compiling() or type(tensor) is not Tensor


def _read_inputs(
    retrieved: Tensor,
    log_partition: Tensor,
    updates: Sequence[Tensor],
    coefficients: Tensor | None,
    queries: Tensor | None,
    gates: Sequence[GateParameters],
    route: Route,
    eps: float,
    norm: Norm | None,
) -> ReadInputs:
    """As they are; of no updates there are no coefficients, and nothing to ask."""
    return ReadInputs(
        retrieved,
        log_partition,
        list(updates),
        coefficients if updates else None,
        queries if updates else None,
        [parameter for gate in gates for parameter in gate],
        None if norm is None else norm.weight,
        list(route[0]),
        list(route[1]),
        eps,
        0.0 if norm is None else norm.eps,
    )


def _read(given: ReadInputs) -> tuple[Tensor, Tensor]:
    """`autograd.read`, with gates or without."""
    fit = given._replace(
        retrieved=given.retrieved.contiguous(),
        partition=_parameter(given.partition),
        updates=_contiguous(given.updates),
        coefficients=None if given.coefficients is None else _parameter(given.coefficients),
        queries=None if given.queries is None else _parameter(given.queries),
        gates=[_parameter(gate) for gate in given.gates],
        norm=None if given.norm is None else _parameter(given.norm),
    )
    return autograd.read(*fit) if _recorded(fit.retrieved) else autograd.run_read(fit)


def _contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Streams as a kernel takes them."""
    return [tensor.contiguous() for tensor in tensors]


def _parameter(parameter: Tensor) -> Tensor:
    """Parameters and token-wise numbers as a kernel takes them: in float32 and contiguous."""
    fits = parameter.dtype is torch.float32 and parameter.is_contiguous()
    return parameter if fits else parameter.to(torch.float32).contiguous()
