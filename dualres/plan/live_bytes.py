"""Counts the bytes of live tensors while operations run, also on fake tensors, which have sizes and no memory."""

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of tensors that were created inside and are alive, `now` and at their `peak`; `older` ones do not count.

    A new tensor gets the current `tag`.
    """

    def __init__(self, older: Iterable[Tensor], tag: str = ""):
        super().__init__()
        self.now = self.peak = 0
        self.tag = tag
        self.tags: dict[int, str] = {}
        self.older = [tensor.untyped_storage() for tensor in older]
        self.known = {storage._cdata for storage in self.older}
        self.alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self.known:  # a view, or changed in place
            return

        def freed(_: object) -> None:
            self.known.discard(address)
            del self.alive[address]
            self.now -= size

        self.known.add(address)
        self.tags[address] = self.tag
        self.alive[address] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)

    def retag(self, tensor: Tensor, tag: str) -> None:
        self.tags[tensor.untyped_storage()._cdata] = tag

    def by_tag(self) -> Counter[str]:
        sizes: Counter[str] = Counter()
        for address, storage in self.alive.items():
            sizes[self.tags[address]] += storage().nbytes()  # type: ignore[union-attr]
        return sizes
