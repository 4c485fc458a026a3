"""The most bytes of tensors that are alive at a time in a piece of real work, from PyTorch's operations.

PyTorch's profiler counts what kernels take for themselves, too, which differs from one processor to the next, and does
not see what the threads of gloo give back.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Storages that operations return or take, but for those of `older` tensors. FSDP2 resizes its own in place."""

    def __init__(self, older: Iterable[Tensor]):
        super().__init__()
        self.older = [tensor.untyped_storage() for tensor in older]  # alive, so that no one gets their address
        self.known = {storage._cdata for storage in self.older}
        self.alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # and then this sees what is inside
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self._see(tensor.untyped_storage())
        sizes = [(address, storage()) for address, storage in self.alive.items()]
        self.most = max(self.most, sum(storage.nbytes() for _, storage in sizes if storage is not None))
        for address, storage in sizes:
            if storage is None:
                del self.alive[address]
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        held = self.alive.get(address)
        if address not in self.known and (held is None or held() is not storage):
            self.alive[address] = weakref.ref(storage)
