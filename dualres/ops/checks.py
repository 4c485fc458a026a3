"""What a fused operator accepts: kernels find rows by address and check nothing themselves.

Every call is checked once, where an operator hands over to its kernel, and by its shape function when it is traced.
The equations take any layout and mix dtypes up to float32: there, `exact=False`, shapes and devices are checked.
"""
# N token axes, as many as there are  D width  J stored streams  O output streams  R history  U query sets  K updates

from collections.abc import Sequence

import torch
from torch import Tensor

from dualres.ops.arguments import HyperReadArguments, ReadArguments

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that the kernels know
MOST_STREAMS = 2  # of a read


def prefix(
    history: Sequence[Tensor],
    queries: Tensor,
    key: Sequence[int],
    value: Sequence[int],
    exact: bool,
    name: str = "history",
) -> None:
    """history R × (J,N,D), queries (U,O,D)"""
    state = _states(name, history, 2, exact)
    _route(key, value, len(state))
    sets = queries.shape[0] if queries.ndim == 3 else 1
    _fits("queries", queries, (max(sets, 1), len(key), state.shape[-1]), state, exact)


def prefix_backward(
    d_retrieved: Sequence[Tensor],
    d_log_partition: Sequence[Tensor],
    history: Sequence[Tensor],
    queries: Tensor,
    log_partition: Sequence[Tensor],
    logits: Tensor,
    norms: Tensor,
    key: Sequence[int],
    value: Sequence[int],
) -> None:
    """As `prefix` takes them and makes them; the gradients are like what they are of."""
    prefix(history, queries, key, value, exact=True)
    state, (sets, outputs, width) = history[0], queries.shape
    streams, *tokens = state.shape[:-1]
    for name, given in (
        ("d_retrieved", d_retrieved),
        ("d_log_partition", d_log_partition),
        ("log_partition", log_partition),
    ):
        if len(given) != sets:
            raise ValueError(f"{name}: {len(given)} tensors are given where {sets} query sets need one each")
    for gradient in d_retrieved:
        _fits("d_retrieved", gradient, (outputs, *tokens, width), state, exact=True, dtype=state.dtype)
    for name, given in (("d_log_partition", d_log_partition), ("log_partition", log_partition)):
        for one in given:
            _fits(name, one, (outputs, *tokens), state, exact=True)
    _fits("logits", logits, (len(history), sets, outputs, *tokens), state, exact=True)
    _fits("norms", norms, (len(history), streams, *tokens), state, exact=True)


def read(given: ReadArguments, exact: bool) -> None:
    """See `ReadArguments`."""
    retrieved = _states("retrieved", [given.retrieved], 2, exact)
    outputs, *tokens, width = retrieved.shape
    live = len(given.updates) > 0
    streams = MOST_STREAMS
    if live:
        if given.coefficients is None or given.query is None:
            raise ValueError("a read with a live state needs the coefficients of its updates, and queries")
        _sum(given.updates, given.coefficients, exact)
        streams = given.coefficients.shape[1]
        _alike("retrieved state and updates", (retrieved[0], given.updates[0]))
    elif exact and (given.coefficients is not None or given.query is not None):
        raise ValueError("a read without updates takes neither coefficients nor queries")
    _route(given.key, given.value, streams)
    if len(given.key) != outputs:
        raise ValueError(f"the route has {len(given.key)} output streams, and {outputs} are retrieved")
    streams = streams if live else outputs
    if streams > MOST_STREAMS or outputs != (2 if given.gates else 1) or (given.gates and streams != 2):
        raise ValueError(f"a read is of one or two streams, with gates of two, but {streams} make {outputs}")
    if live:
        assert given.query is not None
        _fits("queries", given.query, (outputs, width), retrieved, exact)
    _fits("log_partition", given.log_partition, (outputs, *tokens), retrieved, exact)
    if given.gates:
        _gates(given.gates, (2, 2, 1) if live else (2, 2), 2, retrieved, exact)
    if given.norm is not None:
        _fits("the norm's weight", given.norm, (width,), retrieved, exact)


def read_backward(d_h: Tensor, d_next_coefficients: Tensor, given: ReadArguments, exact: bool) -> None:
    """d_h (N,D) and, with gates, d_next_coefficients (K+1,2,N)"""
    read(given, exact)
    _fits("d_h", d_h, given.retrieved.shape[1:], given.retrieved, exact, given.retrieved.dtype)
    if given.gates:
        _fits(
            "d_next_coefficients",
            d_next_coefficients,
            (len(given.updates) + 1, *given.log_partition.shape),
            given.retrieved,
            exact,
        )


def hyper_read(given: HyperReadArguments, exact: bool) -> None:
    """See `HyperReadArguments`."""
    update, streams = _sum(given.updates, given.coefficients, exact), given.coefficients.shape[1]
    _gates(given.gates, (streams, streams, streams * streams), streams, update, exact)
    if given.norm is not None:
        _fits("the norm's weight", given.norm, update.shape[-1:], update, exact)
    if given.steps < 1:
        raise ValueError(f"steps={given.steps}: Sinkhorn takes at least 1")


def hyper_read_backward(d_h: Tensor, d_next_coefficients: Tensor, given: HyperReadArguments, exact: bool) -> None:
    """d_h (N,D), d_next_coefficients (K+1,J,N)"""
    hyper_read(given, exact)
    update = given.updates[0]
    _fits("d_h", d_h, update.shape, update, exact, update.dtype)
    _fits(
        "d_next_coefficients",
        d_next_coefficients,
        (len(given.updates) + 1, *given.coefficients.shape[1:]),
        update,
        exact,
    )


def write(updates: Sequence[Tensor], coefficients: Tensor, exact: bool) -> None:
    """updates K × (N,D), coefficients (K,J,N)"""
    _sum(updates, coefficients, exact)


def write_backward(d_live: Tensor, updates: Sequence[Tensor], coefficients: Tensor, exact: bool) -> None:
    """d_live (J,N,D); updates K × (N,D), or none if the coefficients are constants"""
    _states("d_live", [d_live], 2, exact)
    if len(updates) > 0:
        _alike("d_live and updates", (d_live[0], _sum(updates, coefficients, exact)))
    count = coefficients.shape[0] if coefficients.ndim > 0 else 1
    _fits("coefficients", coefficients, (max(count, 1), *d_live.shape[:-1]), d_live, exact)


def rms_norm(stream: Tensor, weight: Tensor) -> None:
    """stream (1,N,D), the norm's weight (D,)"""
    _states("stream", [stream], 2, exact=False)
    if stream.shape[0] != 1:
        raise ValueError(f"stream of shape {tuple(stream.shape)} must be one, (1, …, width)")
    _fits("the norm's weight", weight, stream.shape[-1:], stream, exact=False)


def gate_logits(streams: Tensor, gate: Sequence[Tensor]) -> None:
    """streams (J,N,D) and the gate's weight (G,J,D), scale (1,) and bias (G,)"""
    _states("streams", [streams], 2, exact=False)
    values = gate[0].shape[0] if gate[0].ndim > 0 else 1
    _gates(gate, (values,), streams.shape[0], streams, exact=False)


def grouped_linear(name: str, rows: Tensor, other: Tensor, counts: Tensor) -> None:
    """rows (M,D), counts (E,), and either weights (E,F,D) or a gradient (M,F)"""
    if rows.ndim != 2:
        raise ValueError(f"rows of shape {tuple(rows.shape)} must be (rows, width)")
    if counts.ndim != 1 or counts.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"counts of shape {tuple(counts.shape)}, {counts.dtype}, must be one integer for each group")
    if name == "weight":
        fits = other.ndim == 3 and other.shape[0] == counts.shape[0] and other.shape[2] == rows.shape[1]
    else:
        fits = other.ndim == 2 and other.shape[0] == rows.shape[0]
    if not fits or other.dtype != rows.dtype or not other.device == counts.device == rows.device:
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


def _states(name: str, tensors: Sequence[Tensor], least: int, exact: bool) -> Tensor:
    """The first of at least one tensor, all alike, of `least` axes or more and a width. R × (J,N,D) or K × (N,D)"""
    if len(tensors) == 0:
        raise ValueError(f"{name}: there is no tensor, give at least one")
    first = tensors[0]
    if first.ndim < least or first.shape[-1] == 0 or (least == 2 and first.shape[0] == 0):
        axes = "(streams, …, width)" if least == 2 else "(…, width)"
        raise ValueError(f"{name} of shape {tuple(first.shape)} must be {axes}, of one or more each")
    _alike(name, tensors)
    if not first.is_floating_point():
        raise ValueError(f"{name} of {first.dtype}: streams are of floating-point numbers")
    if exact:
        if first.dtype not in DTYPES:
            raise ValueError(f"{name} of {first.dtype}: the kernels take float32, bfloat16 and float16")
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError(f"{name} of strides {tensor.stride()}: the kernels take contiguous tensors")
    return first


def _alike(name: str, tensors: Sequence[Tensor]) -> None:
    """All of one shape, dtype and device."""
    first = tensors[0]
    for tensor in tensors[1:]:
        if tensor.shape != first.shape or tensor.dtype != first.dtype or tensor.device != first.device:
            kinds = sorted({f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in tensors})
            raise ValueError(f"{name}: all must have one shape, dtype and device, but there are {'; '.join(kinds)}")


def _sum(updates: Sequence[Tensor], coefficients: Tensor, exact: bool) -> Tensor:
    """Updates K × (N,D) and their coefficients (K,J,N) in live streams. -> the first update"""
    update = _states("updates", updates, 1, exact)
    count, streams, *tokens = coefficients.shape if coefficients.ndim > 1 else (0, 0)
    if (count, *tokens) != (len(updates), *update.shape[:-1]) or streams == 0:
        raise ValueError(
            f"coefficients of shape {tuple(coefficients.shape)} do not fit {len(updates)} updates of shape "
            f"{tuple(update.shape)}: they must be (updates, streams, *tokens)"
        )
    _fits("coefficients", coefficients, coefficients.shape, update, exact)
    return update


def _route(key: Sequence[int], value: Sequence[int], streams: int) -> None:
    """Keys and values of the output streams, among the stored streams."""
    if len(key) != len(value) or len(key) == 0:
        raise ValueError(f"the route has {len(key)} keys and {len(value)} values: give one of each per output stream")
    for chosen in (*key, *value):
        if not 0 <= chosen < streams:
            raise ValueError(f"the route reads stream {chosen}, and only {streams} are stored, numbered from 0")


def _gates(gates: Sequence[Tensor], values: Sequence[int], streams: int, like: Tensor, exact: bool) -> None:
    """Weight, scale and bias of gates with so many values each, in a row."""
    if len(gates) != 3 * len(values):
        raise ValueError(f"{len(gates) / 3:g} gates are given where {len(values)} are needed")
    for n, count in enumerate(values):
        weight, scale, bias = gates[3 * n : 3 * n + 3]
        _fits("a gate's weight", weight, (count, streams, like.shape[-1]), like, exact)
        _fits("a gate's scale", scale, (1,), like, exact)
        _fits("a gate's bias", bias, (count,), like, exact)


def _fits(
    name: str, tensor: Tensor, shape: Sequence[int], like: Tensor, exact: bool, dtype: torch.dtype = torch.float32
) -> None:
    """Of that shape, where the stream `like` is; for a kernel also of that dtype and contiguous."""
    if tensor.shape != tuple(shape) or tensor.device != like.device:
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} on {tensor.device} does not fit streams of width "
            f"{like.shape[-1]} on {like.device}: it must have the shape {tuple(shape)} there"
        )
    if exact and (tensor.dtype is not dtype or not tensor.is_contiguous()):
        raise ValueError(f"{name} of {tensor.dtype} and strides {tensor.stride()} must be {dtype} and contiguous")
    if (tensor.dtype is torch.float64) != (like.dtype is torch.float64):
        raise ValueError(f"{name} of {tensor.dtype} does not fit streams of {like.dtype}: float64 goes with float64")
