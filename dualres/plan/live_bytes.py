"""Counts the bytes of live tensors while operations run, including fake tensors, which have sizes but no memory."""

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of live tensors created inside the context, `now` and at their `peak`; `older` tensors do not count.

    A new tensor gets the current `tag`.
    """

    def __init__(self, older: Iterable[Tensor], tag: str = ""):
        super().__init__()
        self.now = self.peak = 0
        self.tag = tag
        self.older = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in older}
        self.sizes: dict[int, int] = {}  # bytes of live storages, by address
        self.tags: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self.older or address in self.sizes:  # a view, or changed in place
            return
        self.sizes[address], self.tags[address] = storage.nbytes(), self.tag
        weakref.finalize(storage, self._freed, address)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _freed(self, address: int) -> None:
        self.now -= self.sizes.pop(address)

    def retag(self, tensor: Tensor, tag: str) -> None:
        self.tags[tensor.untyped_storage()._cdata] = tag

    def by_tag(self) -> Counter[str]:
        totals: Counter[str] = Counter()
        for address, size in self.sizes.items():
            totals[self.tags[address]] += size
        return totals
