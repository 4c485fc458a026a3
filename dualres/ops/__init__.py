"""The operators of the pathways, and the experts' product. Which runs on which device is decided here alone."""

import functools
from collections.abc import Callable
from typing import TypeVar, cast

import torch

from dualres.ops import grouped, reference

Op = TypeVar("Op", bound=Callable[..., object])


def full_precision(op: Op) -> Op:
    """`op` with autocast off: depth scores and gates are float32 also inside a bfloat16 autocast region."""

    @functools.wraps(op)
    def call(*args: object) -> object:
        first = args[0]
        device = (first if isinstance(first, torch.Tensor) else cast(tuple[torch.Tensor, ...], first)[0]).device.type
        if not torch.amp.is_autocast_available(device):
            return op(*args)
        with torch.autocast(device, enabled=False):
            return op(*args)

    return cast(Op, call)


depth_weights = full_precision(reference.depth_weights)
prefix = full_precision(reference.prefix)
merge = full_precision(reference.merge)
gate_logits = full_precision(reference.gate_logits)
mix = full_precision(reference.mix)
transport = full_precision(reference.transport)
gated_write = full_precision(reference.gated_write)
sinkhorn = full_precision(reference.sinkhorn)
mix_streams = full_precision(reference.mix_streams)
grouped_linear = grouped.grouped_linear
