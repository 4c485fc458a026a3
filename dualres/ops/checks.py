"""What the operators accept: kernels find rows by address and check nothing themselves.

Every call is checked once, where an operator hands over to its kernel, and by its shape function when it is traced.
Shapes and devices are checked for every call, dtypes and layout (`kernel_inputs`) for fused operators only: the
equations take any layout and compute in float32 or wider.
"""
# N token axes, as many as there are  D width  J stored streams  O output streams  R history  U query sets  K updates

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dualres.ops.arguments import STREAMS, HyperReadArguments, ReadArguments, Result, WriteArguments

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of streams, in the kernels
MAX_STREAMS = 2  # of a read


def kernel_inputs(given: Any) -> None:
    """Streams in a dtype that the kernels have, everything else in float32, all contiguous."""
    for name, value in zip(given._fields, given, strict=True):
        dtypes = DTYPES if name in STREAMS else (torch.float32,)
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, Tensor) and (tensor.dtype not in dtypes or not tensor.is_contiguous()):
                raise ValueError(
                    f"{name} of {tensor.dtype} and strides {tensor.stride()}: the kernels take contiguous tensors of "
                    f"{' or '.join(map(str, dtypes))}"
                )


def like_results(role: str, given: Sequence[Tensor], results: Sequence[Result]) -> None:
    """Gradients of an operator's results, or the results themselves: of their shapes, dtypes and device, contiguous."""
    if len(given) != len(results):
        raise ValueError(f"{len(given)} tensors are given for {role}{results[0].name} …, which are {len(results)}")
    for tensor, (name, shape, like) in zip(given, results, strict=True):
        _has_shape(role + name, tensor, shape, like)
        if tensor.dtype is not like.dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{role}{name} of {tensor.dtype} and strides {tensor.stride()} must be {like.dtype} and contiguous"
            )


def streams(name: str, tensors: Sequence[Tensor], axes: int) -> Tensor:
    """The first of at least one tensor, all alike, of `axes` axes or more. R × (J,N,D) or K × (N,D)"""
    if len(tensors) == 0:
        raise ValueError(f"{name}: there is no tensor, give at least one")
    first = tensors[0]
    if first.ndim < axes or first.shape[-1] == 0 or (axes == 2 and first.shape[0] == 0):
        wanted = "(streams, …, width)" if axes == 2 else "(…, width)"
        raise ValueError(f"{name} of shape {tuple(first.shape)} must be {wanted}, of one or more each")
    _same_kind(name, tensors)
    if not first.is_floating_point():
        raise ValueError(f"{name} of {first.dtype}: streams are of floating-point numbers")
    return first


def prefix(
    history: Sequence[Tensor], queries: Tensor, key: Sequence[int], value: Sequence[int], name: str = "history"
) -> None:
    """history R × (J,N,D), queries (U,O,D)"""
    state = streams(name, history, 2)
    _route(key, value, len(state))
    sets = queries.shape[0] if queries.ndim == 3 else 1
    _has_shape("queries", queries, (max(sets, 1), len(key), state.shape[-1]), state)


def read(given: ReadArguments) -> None:
    """See `ReadArguments`."""
    retrieved = streams("retrieved", [given.retrieved], 2)
    outputs, *tokens, width = retrieved.shape
    live = len(given.updates) > 0
    stored = MAX_STREAMS
    if live:
        if given.coefficients is None or given.query is None:
            raise ValueError("a read with a live state needs the coefficients of its updates, and queries")
        write(WriteArguments(given.updates, given.coefficients))
        stored = given.coefficients.shape[1]
        _same_kind("retrieved state and updates", (retrieved[0], given.updates[0]))
    elif given.coefficients is not None or given.query is not None:
        raise ValueError("a read without updates takes neither coefficients nor queries")
    _route(given.key, given.value, stored)
    if len(given.key) != outputs:
        raise ValueError(f"the route has {len(given.key)} output streams, and {outputs} are retrieved")
    stored = stored if live else outputs
    if stored > MAX_STREAMS or outputs != (2 if given.gates else 1) or (given.gates and stored != 2):
        raise ValueError(f"a read is of one or two streams, with gates of two, but {stored} make {outputs}")
    if given.query is not None:
        _has_shape("queries", given.query, (outputs, width), retrieved)
    _has_shape("log_partition", given.log_partition, (outputs, *tokens), retrieved)
    if given.gates:
        _gates(given.gates, (2, 2, 1) if live else (2, 2), 2, retrieved)
    _norm(given.norm, retrieved)


def hyper_read(given: HyperReadArguments) -> None:
    """See `HyperReadArguments`."""
    write(WriteArguments(given.updates, given.coefficients))
    update, streams = given.updates[0], given.coefficients.shape[1]
    _gates(given.gates, (streams, streams, streams * streams), streams, update)
    _norm(given.norm, update)
    if given.steps < 1:
        raise ValueError(f"steps={given.steps}: Sinkhorn takes at least 1")


def write(given: WriteArguments) -> None:
    """See `WriteArguments`."""
    update, coefficients = streams("updates", given.updates, 1), given.coefficients
    count, stored, *tokens = coefficients.shape if coefficients.ndim > 1 else (0, 0)
    if (count, *tokens) != (len(given.updates), *update.shape[:-1]) or stored == 0:
        raise ValueError(
            f"coefficients of shape {tuple(coefficients.shape)} do not fit {len(given.updates)} updates of shape "
            f"{tuple(update.shape)}: they must be (updates, streams, *tokens)"
        )
    _has_shape("coefficients", coefficients, coefficients.shape, update)


def rms_norm(stream: Tensor, weight: Tensor) -> None:
    """stream (1,N,D), the norm's weight (D,)"""
    streams("stream", [stream], 2)
    if stream.shape[0] != 1:
        raise ValueError(f"stream of shape {tuple(stream.shape)} must be one, (1, …, width)")
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
        raise ValueError(f"counts of shape {tuple(counts.shape)}, {counts.dtype}, must be one integer for each group")
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
    """Counts that fit the rows; they are looked at where that waits for no GPU."""
    if counts.device.type == "cpu":
        each = counts.tolist()
        if sum(each) != len(rows) or min(each, default=0) < 0:
            raise ValueError(f"counts {each} do not fit {len(rows)} rows: none is negative, and they sum to the rows")


def _same_kind(name: str, tensors: Sequence[Tensor]) -> None:
    """All of one shape, dtype and device."""
    first = tensors[0]
    for tensor in tensors[1:]:
        if tensor.shape != first.shape or tensor.dtype != first.dtype or tensor.device != first.device:
            kinds = sorted({f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in tensors})
            raise ValueError(f"{name}: all must have one shape, dtype and device, but there are {'; '.join(kinds)}")


def _route(key: Sequence[int], value: Sequence[int], streams: int) -> None:
    """Keys and values of the output streams, among the stored streams."""
    if len(key) != len(value) or len(key) == 0:
        raise ValueError(f"the route has {len(key)} keys and {len(value)} values: give one of each per output stream")
    for stream in (*key, *value):
        if not 0 <= stream < streams:
            raise ValueError(f"the route reads stream {stream}, and only {streams} are stored, numbered from 0")


def _gates(gates: Sequence[Tensor], values: Sequence[int], streams: int, like: Tensor) -> None:
    """Weight, scale and bias of gates with so many values each, in a row."""
    if len(gates) != 3 * len(values):
        raise ValueError(f"{len(gates) / 3:g} gates are given where {len(values)} are needed")
    for n, count in enumerate(values):
        weight, scale, bias = gates[3 * n : 3 * n + 3]
        _has_shape("a gate's weight", weight, (count, streams, like.shape[-1]), like)
        _has_shape("a gate's scale", scale, (1,), like)
        _has_shape("a gate's bias", bias, (count,), like)


def _norm(weight: Tensor | None, like: Tensor) -> None:
    if weight is not None:
        _has_shape("the norm's weight", weight, like.shape[-1:], like)


def _has_shape(name: str, tensor: Tensor, shape: Sequence[int], like: Tensor) -> None:
    """Of that shape, on the device of the streams `like`, and float64 where they are."""
    if tensor.shape != tuple(shape) or tensor.device != like.device:
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} on {tensor.device} does not fit streams of width "
            f"{like.shape[-1]} on {like.device}: it must have the shape {tuple(shape)} there"
        )
    if (tensor.dtype is torch.float64) != (like.dtype is torch.float64):
        raise ValueError(f"{name} of {tensor.dtype} does not fit streams of {like.dtype}: float64 goes with float64")
