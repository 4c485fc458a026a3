"""The operators of the pathways, and the experts' product: fused kernels where the device has them, else equations."""
# B batch  T tokens  D width  J stored streams  O output streams  R history  U query sets  K updates

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from dualres.ops import autograd, dispatch, grouped, reference
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
        return reference.prefix(history, queries, route, eps)
    states = _alike("history", history)
    key, value = _route(route, len(states[0]))
    asked = _parameter("queries", queries, (len(queries), len(key), states[0].shape[-1]), states[0])
    run = autograd if _recorded(states[0]) else dispatch.kernels(states[0])
    found = run.prefix(states, asked, key, value, eps)
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
    if dispatch.kind(retrieved) == "reference":
        return reference.read(retrieved, log_partition, updates, coefficients, queries, route, eps, norm)
    return _read(retrieved, log_partition, updates, coefficients, queries, (), route, eps, norm)[0]


@full_precision
def normed(stream: Tensor, norm: Norm | None) -> Tensor:
    """A read of one stream and nothing else, then the branch's norm if it is given. (1,B,T,D) -> (B,T,D)"""
    if norm is None:
        return stream.squeeze(0)
    if dispatch.kind(stream) == "reference":
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
    if dispatch.kind(retrieved) == "reference":
        return reference.gated_read(retrieved, log_partition, updates, coefficients, queries, gates, route, eps, norm)
    return _read(retrieved, log_partition, updates, coefficients, queries, gates, route, eps, norm)


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
    if dispatch.kind(updates[0]) == "reference":
        return reference.hyper_read(updates, coefficients, gates, steps, eps, norm)
    rows, weights = _sum(updates, coefficients)
    streams = coefficients.shape[1]
    own = _gates(gates, (streams, streams, streams * streams), streams, rows[0])
    weight = None if norm is None else _parameter("the norm's weight", norm.weight, rows[0].shape[-1:], rows[0])
    given = HyperInputs(rows, weights, own, weight, steps, eps, 0.0 if norm is None else norm.eps)
    return autograd.hyper_read(*given) if _recorded(rows[0]) else dispatch.kernels(rows[0]).hyper_read(given)


@full_precision
def write(updates: Sequence[Tensor], coefficients: Tensor) -> Tensor:
    """The live streams P^j = Σ_k C_k^j u_k as a state. updates K × (B,T,D), coefficients (K,J,B,T) -> (J,B,T,D)"""
    if dispatch.kind(updates[0]) == "reference":
        return reference.write(updates, coefficients)
    rows, weights = _sum(updates, coefficients)
    return (autograd if _recorded(rows[0]) else dispatch.kernels(rows[0])).write(rows, weights)


depth_weights = full_precision(reference.depth_weights)
gate_logits = full_precision(reference.gate_logits)
grouped_linear = grouped.grouped_linear


def _recorded(tensor: Tensor) -> bool:
    """Whether there may be a gradient or a graph to record; kernels are called directly where there is neither."""
    return torch.is_grad_enabled() or torch.compiler.is_compiling() or type(tensor) is not Tensor


def _read(
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
    """`autograd.read`, with gates or without."""
    rows: list[Tensor] = []
    weights = asked = None
    *tokens, width = retrieved.shape[1:]
    key, value = _route(route, max(*route[0], *route[1]) + 1 if coefficients is None else coefficients.shape[1])
    outputs = len(key)
    if len(retrieved) != outputs:
        raise ValueError(f"the route has {outputs} output streams, and {len(retrieved)} are retrieved")
    streams = outputs if coefficients is None else coefficients.shape[1]
    if streams > 2 or (gates and (streams, outputs) != (2, 2)):
        raise ValueError(f"a read is of one or two streams, with gates of two, but {streams} make {outputs}")
    if updates:
        if coefficients is None or queries is None:
            raise ValueError("a read with a live state needs the coefficients of its updates, and queries")
        rows, weights = _sum(updates, coefficients)
        asked = _parameter("queries", queries, (outputs, width), retrieved)
        _alike("retrieved state and updates", (retrieved[0], rows[0]))
    given = ReadInputs(
        retrieved.contiguous(),
        _parameter("log-partition", log_partition, (outputs, *tokens), retrieved),
        rows,
        weights,
        asked,
        _gates(gates, (2, 2, 1)[: 3 if updates else 2], 2, retrieved) if gates else [],
        None if norm is None else _parameter("the norm's weight", norm.weight, (width,), retrieved),
        key,
        value,
        eps,
        0.0 if norm is None else norm.eps,
    )
    return autograd.read(*given) if _recorded(given.retrieved) else dispatch.kernels(given.retrieved).read(given)


def _route(route: Route, streams: int) -> tuple[list[int], list[int]]:
    """Keys and values of the output streams, if there are streams enough."""
    key, value = (list(chosen) for chosen in route)
    if max(*key, *value) >= streams:
        raise ValueError(f"the route reads stream {max(*key, *value)}, and only {streams} are stored, numbered from 0")
    return key, value


def _sum(updates: Sequence[Tensor], coefficients: Tensor) -> tuple[list[Tensor], Tensor]:
    """Updates and coefficients of live streams, fit for a kernel: it finds rows by address and cannot check them."""
    rows = _alike("updates", updates)
    count, _, *tokens = coefficients.shape
    if (count, *tokens) != (len(rows), *rows[0].shape[:-1]):
        raise ValueError(
            f"coefficients of shape {tuple(coefficients.shape)} do not fit {len(rows)} updates of shape "
            f"{tuple(rows[0].shape)}: they must be (updates, streams, batch, tokens)"
        )
    return rows, coefficients.to(torch.float32).contiguous()


def _alike(name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, contiguous, if all are of one shape, dtype and device."""
    first = tensors[0]
    for tensor in tensors:
        if tensor.shape != first.shape or tensor.dtype != first.dtype or tensor.device != first.device:
            kinds = sorted({f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in tensors})
            raise ValueError(f"{name}: all must have one shape, dtype and device, but there are {'; '.join(kinds)}")
    return [tensor.contiguous() for tensor in tensors]


def _gates(gates: Sequence[GateParameters], values: Sequence[int], streams: int, like: Tensor) -> list[Tensor]:
    """Weight, scale and bias of gates with so many values each, in a row."""
    if len(gates) != len(values):
        raise ValueError(f"{len(gates)} gates are given where {len(values)} are needed")
    return [
        _parameter(f"a gate's {name}", parameter, shape, like)
        for gate, count in zip(gates, values, strict=True)
        for name, parameter, shape in zip(
            gate._fields, gate, ((count, streams, like.shape[-1]), (1,), (count,)), strict=True
        )
    ]


def _parameter(name: str, parameter: Tensor, shape: Sequence[int], like: Tensor) -> Tensor:
    """In float32 and contiguous, if it is of that shape and where the stream `like` is."""
    if parameter.shape != tuple(shape) or parameter.device != like.device:
        raise ValueError(
            f"{name} of shape {tuple(parameter.shape)} on {parameter.device} does not fit streams of width "
            f"{like.shape[-1]} on {like.device}: it must have the shape {tuple(shape)} there"
        )
    fits = parameter.dtype is torch.float32 and parameter.is_contiguous()
    return parameter if fits else parameter.to(torch.float32).contiguous()
