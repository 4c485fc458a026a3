"""The operators as pathways call them: fused kernels if the device has them, otherwise the equations."""
# B batch  T tokens  D width  J stored streams  O output streams  R history  U query sets  K updates

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from dualres.ops import autograd, checks, dispatch, reference
from dualres.ops.arguments import (
    BlockArguments,
    GateLike,
    GateParameters,
    HyperReadArguments,
    Live,
    Norm,
    Prefix,
    PrefixArguments,
    ReadArguments,
    Route,
    WriteArguments,
)

P = ParamSpec("P")
T = TypeVar("T")


def no_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """Run `function` with autocast off: depth scores and gates are float32 inside a bfloat16 autocast region too."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        device = _device(args, function)
        if not _autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return call


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product with `x`, as in `nn.Linear`: autocast's if it is enabled."""
    return torch.get_autocast_dtype(x.device.type) if _autocast_enabled(x.device.type) else x.dtype


def _autocast_enabled(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


class Equations:
    """The equations, with autocast off."""

    prefix = staticmethod(no_autocast(reference.prefix))
    read = staticmethod(no_autocast(reference.read))
    gated_read = staticmethod(no_autocast(reference.gated_read))
    hyper_read = staticmethod(no_autocast(reference.hyper_read))
    write = staticmethod(no_autocast(reference.write))
    rms_norm = staticmethod(no_autocast(reference.rms_norm))


def prefix(history: Sequence[Tensor], queries: Tensor, *, route: Route, eps: float) -> tuple[Prefix, ...]:
    """Phase 1, once per block: what each query set retrieves from the history alone.

    history R × (J,B,T,D), queries (U,O,D) -> one `Prefix` per query set
    """
    return prefix_with_carriers(history, queries, route=route, eps=eps)[0]


def prefix_with_carriers(
    history: Sequence[Tensor], queries: Tensor, *, route: Route, eps: float
) -> tuple[tuple[Prefix, ...], tuple[Tensor, ...]]:
    """`prefix`, and a carrier of each history state, for `passed_on`. -> U × `Prefix`, R × (J,B,T,D) or nothing"""
    if len(history) == 0 or dispatch.kind(history[0]) == "reference":
        checks.prefix(history, queries, *route)
        return Equations.prefix(history, queries, route=route, eps=eps), ()
    arguments = PrefixArguments(list(history), queries, list(route.key), list(route.value), eps)
    outputs, sets = autograd.prefix(arguments), len(queries)
    return tuple(map(Prefix, outputs[:sets], outputs[sets : 2 * sets])), tuple(outputs[2 * sets + 2 :])


def passed_on(history: Sequence[Tensor], carriers: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same states, whose gradient goes to the carriers: to whoever read the states last, which adds its own."""
    return tuple(map(PassedOn.apply, history, carriers)) if carriers else tuple(history)


class PassedOn(torch.autograd.Function):
    """A state with the gradient of its carrier."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, carrier: Tensor) -> Tensor:
        return state.view_as(state)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def read(
    prefix: Prefix, live: Live | None, *, query: Tensor | None, route: Route, eps: float, norm: Norm | None
) -> tuple[Tensor, Prefix, Live | None]:
    """Phase 2 without gates: merge the history with the live state, then apply the branch's norm, if any.

    query (1,D) -> (B,T,D), and the same prefix and live streams for the next read
    """
    if live is None and norm is None:
        return prefix.retrieved.squeeze(0), prefix, live
    if live is not None and live.coefficients.requires_grad:
        raise ValueError("live.coefficients requires grad, but a read without gates takes constants: detach them")
    arguments = _read_arguments(prefix, live, query, (), route, eps, norm)
    if dispatch.kind(prefix.retrieved) == "reference":
        checks.read(arguments)
        return Equations.read(prefix, live, query=query, route=route, eps=eps, norm=norm), prefix, live
    h, _, *carriers = autograd.read(arguments)
    return h, _after_read(prefix, carriers), live and _live_after(live.updates, live.coefficients, carriers[1:])


def gated_read(
    prefix: Prefix,
    live: Live | None,
    *,
    query: Tensor | None,
    gates: Sequence[GateLike],
    route: Route,
    eps: float,
    norm: Norm | None,
) -> tuple[Tensor, Prefix, Live]:
    """Phase 2 of DAR: the branch input h = α⁰h⁰ + α¹h¹, and the live streams with the coefficients [M(ρ) C, β].

    query (2,D), gates α, β and, with a live state, ρ
    -> (B,T,D), the same prefix for the next read, live streams with the next branch output still to be appended
    """
    arguments = _read_arguments(prefix, live, query, gates, route, eps, norm)
    if dispatch.kind(prefix.retrieved) == "reference":
        checks.read(arguments)
        h, left = Equations.gated_read(prefix, live, query=query, gates=gates, route=route, eps=eps, norm=norm)
        return h, prefix, left
    h, next_coefficients, *carriers = autograd.read(arguments)
    updates = live.updates if live else ()
    return h, _after_read(prefix, carriers), _live_after(updates, next_coefficients, carriers[1:])


def hyper_read(
    live: Live, *, gates: Sequence[GateLike], steps: int, eps: float, norm: Norm | None
) -> tuple[Tensor, Live]:
    """The branch input of mHC, Σ_j H_pre^j X^j, and the live streams with the coefficients [H_res C, H_post].

    gates H_pre, H_post, H_res -> (B,T,D), live streams with the next branch output still to be appended
    """
    weight, norm_eps = (None, 0.0) if norm is None else norm
    updates, coefficients, carrier, carried = _fields(live)
    gate_parameters = _flat(gates)
    arguments = HyperReadArguments(
        updates, coefficients, carrier, gate_parameters, weight, carried, steps, eps, norm_eps
    )
    if len(live.updates) == 0 or dispatch.kind(live.updates[0]) == "reference":
        checks.hyper_read(arguments)
        return Equations.hyper_read(live, gates=gates, steps=steps, eps=eps, norm=norm)
    h, next_coefficients, *carriers = autograd.hyper_read(arguments)
    return h, _live_after(live.updates, next_coefficients, carriers)


def write(live: Live) -> Tensor:
    """The live streams P^j = Σ_k C_k^j u_k as a state. -> (J,B,T,D)"""
    arguments = WriteArguments(*_fields(live))
    if len(live.updates) == 0 or dispatch.kind(live.updates[0]) == "reference":
        checks.write(arguments)
        return Equations.write(live)
    return autograd.write(arguments)[0]


def replay(block: BlockArguments) -> Any:
    """A pass through a block with recorded calls, in place of a `Pathway`; None if it must take the regular path.

    It is for few tokens on a CPU, without gradients.
    """
    if not block.history or dispatch.traced(()) or dispatch.kind(block.history[0]) != "cpu":
        return None
    return dispatch.kernels(block.history[0]).replay(block)


def rms_norm(stream: Tensor, norm: Norm | None) -> Tensor:
    """The read of a single stream, then the branch's norm, if any. (1,B,T,D) -> (B,T,D)"""
    if norm is None:
        return stream.squeeze(0)
    kind = dispatch.kind(stream)
    if kind == "reference":
        checks.rms_norm(stream, norm.weight)
        accumulated = reference.to_accumulation_dtype(stream.squeeze(0))
        return Equations.rms_norm(accumulated, norm).to(stream.dtype)
    if kind == "cpu" and not torch.is_grad_enabled() and _ready_for_norm(stream, norm.weight):
        h, (weight, eps) = torch.empty_like(stream), norm
        arguments = ReadArguments(stream, weight, None, [], None, None, None, [], weight, [0], [0], 0, 0.0, eps)
        dispatch.kernels(stream).read(arguments, [h, h])
        return h.squeeze(0)
    unused = stream.new_empty(stream.shape[:-1], dtype=torch.float32)  # there is no live state to merge
    return read(Prefix(stream, unused), None, query=None, route=Route((0,), (0,)), eps=0.0, norm=norm)[0]


def _ready_for_norm(stream: Tensor, weight: Tensor) -> bool:
    """Whether a kernel can take these tensors as they are."""
    contiguous = stream.is_contiguous() and weight.is_contiguous()
    fits = weight.dtype is torch.float32 and weight.is_cpu and weight.shape == stream.shape[-1:]
    shaped = stream.ndim > 1 and len(stream) == 1 and stream.shape[-1] > 0
    return contiguous and shaped and fits and not dispatch.traced((stream, weight))


@no_autocast
def depth_weights(candidates: Sequence[Tensor], queries: Tensor, *, route: Route, eps: float) -> Tensor:
    """Softmax weights over depth, with autocast off: `reference.depth_weights`."""
    checks.prefix(candidates, queries, *route, name="candidates")
    return reference.depth_weights(candidates, queries, route, eps)


@no_autocast
def gate_logits(streams: Tensor, gate: GateLike, eps: float) -> Tensor:
    """Gate logits, with autocast off: `reference.gate_logits`."""
    checks.gate_logits(streams, _flat([gate]))
    return reference.gate_logits(streams, gate, eps)


def _read_arguments(
    prefix: Prefix,
    live: Live | None,
    query: Tensor | None,
    gates: Sequence[GateLike],
    route: Route,
    eps: float,
    norm: Norm | None,
) -> ReadArguments:
    updates, coefficients, carrier, carried = ([], None, None, 0) if live is None else _fields(live)
    weight, norm_eps = (None, 0.0) if norm is None else norm
    query = None if live is None else query
    key, value, rest = list(route.key), list(route.value), (carried, eps, norm_eps)
    return ReadArguments(*prefix, updates, coefficients, carrier, query, _flat(gates), weight, key, value, *rest)


def _fields(live: Live) -> tuple[list[Tensor], Tensor, Tensor | None, int]:
    """The fields of `live` as operators take them: a carrier is for a gradient, and without it no term is carried."""
    updates, coefficients, carrier, carried = live
    if carrier is None or not carrier.requires_grad:
        return list(updates), coefficients, None, 0
    return list(updates), coefficients, carrier, carried


def _after_read(prefix: Prefix, carriers: Sequence[Tensor]) -> Prefix:
    """The prefix for the next read, which adds its gradient to the one of the read that returned these carriers."""
    return Prefix(prefix.retrieved, prefix.log_partition, carriers[0]) if carriers else prefix


def _live_after(updates: tuple[Tensor, ...], coefficients: Tensor, carriers: Sequence[Tensor]) -> Live:
    """The live streams after a read of all updates; without updates there is nothing to carry."""
    return Live(updates, coefficients, carriers[0], len(updates)) if carriers else Live(updates, coefficients)


def _flat(gates: Sequence[GateLike]) -> list[Tensor]:
    flat: list[Tensor] = []
    for gate in gates:
        flat += gate if isinstance(gate, GateParameters) else (gate.weight, gate.scale, gate.bias)
    return flat


def _device(args: Sequence[object], function: Callable[..., object]) -> str:
    """The device of the first tensor in the arguments, which may be bundles."""
    first = args[0]
    while isinstance(first, Sequence) and len(first) > 0:
        first = first[0]
    if not isinstance(first, Tensor):
        name = next(iter(inspect.signature(function).parameters))
        raise TypeError(f"argument {name} contains no tensor: pass at least one, not {args[0]!r}")
    return first.device.type
