"""Argument checks of the operators: kernels access rows by address and check nothing themselves.

Every call is checked once, before an operator calls its kernel, and by its shape function when it is traced. Shapes and
devices are checked for every call, dtypes and layout (`kernel_inputs`) only for fused operators: the equations take any
layout and compute in float32 or wider.
"""
# N any number of token axes  D width  J stored streams  O output streams  R history  U query sets  K updates

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dualres.ops.arguments import CARRIERS, STREAMS, HyperReadArguments, ReadArguments, Result, WriteArguments

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # stream dtypes of the kernels
MAX_STREAMS = 2  # streams of a read


def kernel_inputs(arguments: Any) -> None:
    """Check that streams have a dtype of the kernels, everything else is float32, and all are contiguous."""
    for name, value in zip(arguments._fields, arguments, strict=True):
        if name in CARRIERS:
            continue
        dtypes = DTYPES if name in STREAMS else (torch.float32,)
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, Tensor) and (tensor.dtype not in dtypes or not tensor.is_contiguous()):
                raise ValueError(
                    f"{name} of {tensor.dtype} and strides {tensor.stride()}: the kernels take contiguous tensors of "
                    f"{' or '.join(map(str, dtypes))}"
                )


def like_results(role: str, tensors: Sequence[Tensor | None], results: Sequence[Result]) -> None:
    """Check gradients of an operator's results, or the results: their shapes, dtypes, device and contiguity.

    A gradient that is None is not checked.
    """
    if len(tensors) != len(results):
        raise ValueError(f"{role}{results[0].name} …: expected {len(results)} tensors, got {len(tensors)}")
    for tensor, result in zip(tensors, results, strict=True):
        if tensor is None:
            continue
        _has_shape(role + result.name, tensor, result.shape, result)
        if tensor.dtype is not result.dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{role}{result.name} of {tensor.dtype} and strides {tensor.stride()} must be {result.dtype} and "
                "contiguous"
            )


def first(name: str, tensors: Sequence[Tensor]) -> Tensor:
    """The first of one or more tensors."""
    if len(tensors) == 0:
        raise ValueError(f"{name} is empty: pass at least one tensor")
    return tensors[0]


def streams(name: str, tensors: Sequence[Tensor], axes: int) -> Tensor:
    """Check for one or more matching tensors with at least `axes` axes; return the first. R × (J,N,D) or K × (N,D)"""
    tensor = first(name, tensors)
    if tensor.ndim < axes or tensor.shape[-1] == 0 or (axes == 2 and tensor.shape[0] == 0):
        wanted = "(streams, …, width)" if axes == 2 else "(…, width)"
        raise ValueError(f"{name} of shape {tuple(tensor.shape)} must be {wanted}, with at least 1 of each named axis")
    _same_kind(name, tensors)
    if not tensor.is_floating_point():
        raise ValueError(f"{name} of {tensor.dtype}: streams must be floating-point")
    return tensor


def prefix(
    history: Sequence[Tensor], queries: Tensor, key: Sequence[int], value: Sequence[int], name: str = "history"
) -> None:
    """history R × (J,N,D), queries (U,O,D)"""
    state = streams(name, history, 2)
    _route(key, value, len(state))
    sets = queries.shape[0] if queries.ndim == 3 else 1
    _has_shape("queries", queries, (max(sets, 1), len(key), state.shape[-1]), state)


def read(arguments: ReadArguments) -> None:
    retrieved = streams("retrieved", [arguments.retrieved], 2)
    outputs, *tokens, width = retrieved.shape
    live = len(arguments.updates) > 0
    stored = MAX_STREAMS
    if live:
        if arguments.coefficients is None or arguments.query is None:
            raise ValueError("a read with a live state needs the coefficients of its updates, and queries")
        write(WriteArguments(arguments.updates, arguments.coefficients, arguments.carrier, arguments.carried))
        stored = arguments.coefficients.shape[1]
        _same_kind("retrieved state and updates", (retrieved[0], arguments.updates[0]))
    elif arguments.coefficients is not None or arguments.query is not None or arguments.carried:
        raise ValueError("a read without updates takes neither coefficients nor queries nor carriers of them")
    if arguments.retrieved_carrier is not None:
        _same_kind("retrieved states and their carrier", (retrieved, arguments.retrieved_carrier))
    _route(arguments.key, arguments.value, stored)
    if len(arguments.key) != outputs:
        raise ValueError(f"the route has {len(arguments.key)} output streams, but {outputs} are retrieved")
    stored = stored if live else outputs
    if stored > MAX_STREAMS or outputs != (2 if arguments.gates else 1) or (arguments.gates and stored != 2):
        raise ValueError(f"{stored} stored and {outputs} output streams: a read takes 1 or 2 and 1, with gates 2 and 2")
    if arguments.query is not None:
        _has_shape("queries", arguments.query, (outputs, width), retrieved)
    _has_shape("log_partition", arguments.log_partition, (outputs, *tokens), retrieved)
    if arguments.gates:
        _gates(arguments.gates, (2, 2, 1) if live else (2, 2), 2, retrieved)
    _norm(arguments.norm, retrieved)


def hyper_read(arguments: HyperReadArguments) -> None:
    write(WriteArguments(arguments.updates, arguments.coefficients, arguments.carrier, arguments.carried))
    update, streams = arguments.updates[0], arguments.coefficients.shape[1]
    _gates(arguments.gates, (streams, streams, streams * streams), streams, update)
    _norm(arguments.norm, update)
    if arguments.steps < 1:
        raise ValueError(f"steps={arguments.steps}: Sinkhorn needs at least 1")


def write(arguments: WriteArguments) -> None:
    update, coefficients = streams("updates", arguments.updates, 1), arguments.coefficients
    count, stored, *tokens = coefficients.shape if coefficients.ndim > 1 else (0, 0)
    if (count, *tokens) != (len(arguments.updates), *update.shape[:-1]) or stored == 0:
        raise ValueError(
            f"coefficients of shape {tuple(coefficients.shape)} do not fit {len(arguments.updates)} updates of shape "
            f"{tuple(update.shape)}: they must be (updates, streams, *tokens)"
        )
    _has_shape("coefficients", coefficients, coefficients.shape, update)
    if not 0 <= arguments.carried <= count:
        raise ValueError(f"carried={arguments.carried}: a carrier stands for the first of {count} updates, or for none")
    carrier = arguments.carrier
    if carrier is not None and (carrier.shape != (stored, *update.shape) or carrier.dtype != update.dtype):
        raise ValueError(
            f"a carrier of shape {tuple(carrier.shape)}, {carrier.dtype}, does not fit {stored} live streams of shape "
            f"{tuple(update.shape)}, {update.dtype}"
        )


def rms_norm(stream: Tensor, weight: Tensor) -> None:
    """stream (1,N,D), the norm's weight (D,)"""
    streams("stream", [stream], 2)
    if stream.shape[0] != 1:
        raise ValueError(f"stream of shape {tuple(stream.shape)} must be a single stream, (1, …, width)")
    _norm(weight, stream)


def gate_logits(x: Tensor, gate: Sequence[Tensor]) -> None:
    """Streams (J,N,D) and the gate's weight (G,J,D), scale (1,) and bias (G,)"""
    streams("streams", [x], 2)
    values = gate[0].shape[0] if gate[0].ndim > 0 else 1
    _gates(gate, (values,), x.shape[0], x)


def grouped_linear(name: str, rows: Tensor, other: Tensor, counts: Tensor) -> None:
    """rows (M,D), counts (E,), and either weights (E,F,D) or a gradient (M,F)"""
    if rows.ndim != 2:
        raise ValueError(f"rows of shape {tuple(rows.shape)} must be (rows, width)")
    if counts.ndim != 1 or counts.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"counts of shape {tuple(counts.shape)}, {counts.dtype}, must be one integer per group")
    if name == "weight":
        matches = other.ndim == 3 and other.shape[0] == counts.shape[0] and other.shape[2] == rows.shape[1]
    else:
        matches = other.ndim == 2 and other.shape[0] == rows.shape[0]
    if not matches or other.dtype != rows.dtype or not other.device == counts.device == rows.device:
        raise ValueError(
            f"{name} of shape {tuple(other.shape)}, {other.dtype} on {other.device}, does not fit rows of shape "
            f"{tuple(rows.shape)}, {rows.dtype} on {rows.device}, and counts of shape {tuple(counts.shape)} on "
            f"{counts.device}"
        )


def group_sizes(rows: Tensor, counts: Tensor) -> None:
    """Check that counts fit the rows, on a CPU only: on a GPU this would wait for the device."""
    if counts.device.type == "cpu":
        each = counts.tolist()
        if sum(each) != len(rows) or min(each, default=0) < 0:
            raise ValueError(f"counts {each} do not fit {len(rows)} rows: they must be non-negative and sum to it")


def _same_kind(name: str, tensors: Sequence[Tensor]) -> None:
    """Check for one shape, dtype and device."""
    first = tensors[0]
    for tensor in tensors[1:]:
        if tensor.shape != first.shape or tensor.dtype != first.dtype or tensor.device != first.device:
            kinds = sorted({f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in tensors})
            raise ValueError(f"{name}: all must have one shape, dtype and device, got {'; '.join(kinds)}")


def _route(key: Sequence[int], value: Sequence[int], streams: int) -> None:
    """Check that each output stream has a key and a value among the stored streams."""
    if len(key) != len(value) or len(key) == 0:
        raise ValueError(f"the route has {len(key)} keys and {len(value)} values: pass one of each per output stream")
    for stream in (*key, *value):
        if not 0 <= stream < streams:
            raise ValueError(f"the route reads stream {stream}, but only {streams} are stored, numbered from 0")


def _gates(gates: Sequence[Tensor], values: Sequence[int], streams: int, like: Tensor) -> None:
    """Check the weight, scale and bias of gates with `values` values each."""
    if len(gates) != 3 * len(values):
        raise ValueError(f"expected {len(values)} gates, got {len(gates) / 3:g}")
    for n, count in enumerate(values):
        weight, scale, bias = gates[3 * n : 3 * n + 3]
        _has_shape("a gate's weight", weight, (count, streams, like.shape[-1]), like)
        _has_shape("a gate's scale", scale, (1,), like)
        _has_shape("a gate's bias", bias, (count,), like)


def _norm(weight: Tensor | None, like: Tensor) -> None:
    if weight is not None:
        _has_shape("the norm's weight", weight, like.shape[-1:], like)


def _has_shape(name: str, tensor: Tensor, shape: Sequence[int], like: Tensor | Result) -> None:
    """Check for `shape`, the device of the streams `like`, and float64 if and only if they are."""
    if tensor.shape != tuple(shape) or tensor.device != like.device:
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} on {tensor.device} does not fit streams of width "
            f"{like.shape[-1]} on {like.device}: it must have the shape {tuple(shape)} on that device"
        )
    if (tensor.dtype is torch.float64) != (like.dtype is torch.float64):
        raise ValueError(f"{name} of {tensor.dtype} does not fit {like.dtype} streams: use float64 for both or neither")
