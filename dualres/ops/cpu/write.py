"""The live streams as a state, on a CPU."""
# N tokens  D width  J streams  K updates

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualres.ops.cpu.compiler import compiled
from dualres.ops.cpu.launch import LIKE, addresses, share, stream_addresses, tokenwise
from dualres.ops.cpu.read import live_streams
from dualres.ops.cpu.rows import add, dot, load, row_of, store


def write(updates: list[Tensor], coefficients: Tensor) -> Tensor:
    """See `dualres.ops.autograd.write`."""
    first_update, tokens = updates[0], coefficients[0, 0].numel()
    live = first_update.new_empty(coefficients.shape[1], *first_update.shape)
    arguments = (
        addresses(updates),
        tokenwise(coefficients, 2),
        stream_addresses([live])[0],
        first_update.shape[-1],
        LIKE[live.dtype],
    )
    share(lambda part, first, last: _forward(first, last, arguments), tokens)
    return live


@compiled
def _forward(first: int, last: int, arguments: Any) -> None:
    updates, coefficients, live, width, like = arguments
    sums = np.empty((len(live), width), np.float32)
    for t in range(first, last):
        live_streams(sums, updates, coefficients, t, like)
        for j in range(len(live)):
            store(row_of(live[j], t, width, like), sums[j])


def write_backward(d_live: Tensor, updates: list[Tensor], coefficients: Tensor) -> list[Tensor]:
    """See `dualres.ops.autograd.write_backward`."""
    tokens = coefficients[0, 0].numel()
    d_updates = [torch.empty_like(d_live[0]) for _ in coefficients]
    d_coefficients = torch.empty_like(coefficients if updates else coefficients[:0])
    arguments = (
        stream_addresses([d_live])[0],
        addresses(updates),
        tokenwise(coefficients, 2),
        addresses(d_updates),
        tokenwise(d_coefficients, 2),
        d_live.shape[-1],
        LIKE[d_live.dtype],
    )
    share(lambda part, first, last: _backward(first, last, arguments), tokens)
    return [*d_updates, *([d_coefficients] if updates else [])]


@compiled
def _backward(first: int, last: int, arguments: Any) -> None:
    d_live, updates, coefficients, d_updates, d_coefficients, width, like = arguments
    row, given = np.empty(width, np.float32), np.empty((len(d_live), width), np.float32)
    for t in range(first, last):
        for j in range(len(d_live)):
            load(given[j], row_of(d_live[j], t, width, like))
        for k in range(len(d_updates)):
            if len(d_coefficients) > 0:
                load(row, row_of(updates[k], t, width, like))
                for j in range(len(d_live)):
                    d_coefficients[k, j, t] = dot(row, given[j])
            row[:] = 0
            for j in range(len(d_live)):
                add(row, coefficients[k, j, t], given[j])
            store(row_of(d_updates[k], t, width, like), row)
