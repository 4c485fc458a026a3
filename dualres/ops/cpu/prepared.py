"""A call of a kernel with other tensors of the same shapes: the job is packed once, then only addresses are filled in.

Between the large operations of a training step Python's own data is not cached, and packing takes as long as a kernel
of a small model.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualres.ops.cpu.launch import recorded, run_job

FIRST, STEP = 2**56, 2**44  # invented addresses: greater than any size, and as a float64 a number around 1e-292


class StandIn(NamedTuple):
    """What packing a job asks a contiguous tensor for, with an invented address."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return self.dtype.itemsize

    def stride(self, axis: int) -> int:
        return math.prod(self.shape[axis + 1 :])

    def __len__(self) -> int:
        return self.shape[0]


class Prepared:
    """`function(*bundles)`, which runs one kernel, for tensors in the order in which they are in the bundles."""

    def __init__(self, function: Callable[..., None], bundles: Sequence[Any]):
        self.count = 0
        with recorded() as jobs:
            function(*map(self._stand_ins, bundles))
        (self.words,) = jobs
        (self.places,) = np.nonzero((self.words >= FIRST) & (self.words < FIRST + self.count * STEP))
        self.sources, self.offsets = np.divmod(self.words[self.places] - FIRST, STEP)

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        assert len(tensors) == self.count, "prepared for other bundles"
        addresses = np.array([tensor.data_ptr() for tensor in tensors])
        words = self.words.copy()
        words[self.places] = addresses[self.sources] + self.offsets
        run_job(words)

    def _stand_ins(self, value: Any) -> Any:
        """The same bundle, list or tensor with a stand-in for every tensor."""
        if isinstance(value, Tensor):
            self.count += 1
            return StandIn(tuple(value.shape), value.dtype, FIRST + (self.count - 1) * STEP)
        if isinstance(value, list):
            return [self._stand_ins(one) for one in value]
        return type(value)(*map(self._stand_ins, value)) if isinstance(value, tuple) else value
