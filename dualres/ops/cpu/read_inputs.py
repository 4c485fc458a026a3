"""The inputs of both reads on a CPU, with gates and without."""
# N tokens  D width  J stored streams  O output streams  K updates

import math
from typing import Any, NamedTuple

from torch import Tensor

from dualres.ops.arguments import ReadArguments
from dualres.ops.cpu.launch import address_of
from dualres.ops.cpu.loops import LANES


class ReadInputs(NamedTuple):
    """Of a read or of its backward pass: addresses, 0 for a tensor that is absent, and numbers."""

    retrieved: int
    partition: int
    updates: list[int]
    coefficients: int
    query: int
    gates: list[int]  # weight, scale and bias of α, β and ρ
    norm: int
    key: list[int]
    value: list[int]
    terms: int  # K
    streams: int
    tokens: int
    width: int
    stride: int  # from one row of a buffer to the next
    eps: float
    norm_eps: float
    h: int  # backward, its gradient
    next_coefficients: int  # backward, their gradient
    d_after: int  # the gradient of what the carrier after the read stands for
    d_other: int  # the gradient of the retrieved states from later reads
    carried: int
    d_retrieved: int
    d_partition: int
    d_updates: list[int]
    d_coefficients: int
    d_carrier: int


def read_inputs(arguments: ReadArguments, h: Tensor, next_coefficients: Tensor, *backward: Any) -> ReadInputs:
    retrieved, coefficients = arguments.retrieved, arguments.coefficients
    gates = [parameter.data_ptr() for parameter in arguments.gates]
    width = retrieved.shape[-1]
    return ReadInputs(
        retrieved.data_ptr(),
        arguments.log_partition.data_ptr(),
        [update.data_ptr() for update in arguments.updates],
        address_of(coefficients),
        address_of(arguments.query),
        [*gates, *[0] * (9 - len(gates))],
        address_of(arguments.norm),
        arguments.key,
        arguments.value,
        len(arguments.updates),
        0 if coefficients is None else coefficients.shape[1],
        math.prod(retrieved.shape[1:-1]),
        width,
        -(-width // LANES) * LANES,
        arguments.eps,
        arguments.norm_eps,
        h.data_ptr(),
        next_coefficients.data_ptr(),
        *(backward or (0, 0, 0, 0, 0, [], 0, 0)),
    )
