"""Counts the bytes that this process sends, by kind, from the collectives that PyTorch is really asked for."""

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import GroupName, ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dualres.parallel.mesh import Groups

GATHERS = {"_allgather_base_", "all_gather_into_tensor", "allgather_"}
SCATTERS = {"_reduce_scatter_base_", "reduce_scatter_tensor"}
SUMS = {"allreduce_", "all_reduce", "all_reduce_"}
EXCHANGES = {"alltoall_base_", "all_to_all_single"}
QUIET = {"wait_tensor", "recv_", "_allgather_base", "barrier", "monitored_barrier_", "_wrap_tensor_autograd"}


class Meter(TorchDispatchMode):
    """While it is on, in the thread that entered it."""

    def __init__(self, groups: Groups):
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        # By their ranks: PyTorch may take a group of an earlier engine for one that has the same.
        self.tensor = groups.tensor.mesh.flatten().tolist() if groups.sizes.tensor > 1 else []
        self.shards = [mesh.mesh.flatten().tolist() for mesh in (groups.data, groups.rest)]
        self.ends = dist.get_process_group_ranks(groups.ends) if isinstance(groups.ends, ProcessGroup) else []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # and then this sees what the DTensor asks for
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self._note(func._overloadpacket.__name__, args, kwargs or {}, out)
        return out

    def _note(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        if name in QUIET:
            return
        group = group_of([*args, *kwargs.values()])
        ranks = dist.get_world_size(group)
        tensors = [x for x in tree_leaves((args, out)) if isinstance(x, Tensor)]
        size = max(x.nbytes for x in tensors)  # of what is gathered or scattered, the whole
        members = dist.get_process_group_ranks(group)
        if name in GATHERS or name in SCATTERS:
            assert members == self.tensor or members in self.shards, f"a {name} among {members}"
            kind = "tensor" if members == self.tensor else "weights" if name in GATHERS else "gradients"
            self._add(kind, size * (ranks - 1) // ranks)
        elif name in SUMS:
            counts, numbers = not tensors[0].is_floating_point(), tensors[0].dtype.itemsize == 8
            whole = members in (self.tensor, self.ends) and not numbers
            self._add("tensor" if counts else "shared" if whole else "control", 2 * size * (ranks - 1) // ranks)
        elif name in EXCHANGES:
            self._add("experts", leaving(name, args, ranks, dist.get_rank(group)))
        elif name == "send":
            self._add("pipeline", size)
        else:
            raise AssertionError(f"a collective that no one has planned: {name}")

    def _add(self, kind: str, size: int) -> None:
        self.sent[kind] += size
        self.calls[kind] += 1


def group_of(values: list[Any]) -> ProcessGroup:
    """A functional collective names it last, after the kind of sum."""
    for value in reversed(values):
        if isinstance(value, str):
            return _resolve_process_group(GroupName(value))
        if "ProcessGroup" in str(getattr(value, "_type", lambda: "")()):
            return ProcessGroup.unbox(value)
    raise AssertionError(f"no group among {[type(value) for value in values]}")


def leaving(name: str, args: Any, ranks: int, rank: int) -> int:
    """The rows that this rank sends away; without sizes every rank gets as many."""
    if name == "alltoall_base_":
        _, given, _, _, splits, *_ = args
    else:
        given, _, splits, *_ = args
    rows = given.nbytes // max(1, len(given))
    splits = splits or [len(given) // ranks] * ranks
    return sum(n for to, n in enumerate(splits) if to != rank) * rows
