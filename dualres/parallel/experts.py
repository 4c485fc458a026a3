"""Expert parallelism: each of W ranks holds E/W whole experts, and an all-to-all sends every row to its expert.

A rank sorts its rows by expert, so the rows for one rank are contiguous: one uneven all-to-all sends them, and another
with sizes swapped returns the results. No token is dropped.
"""
# M local rows, grouped by expert  Q received rows  D width  E experts  W ranks

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dualres.model.moe import Experts, LocalExperts, MoE
from dualres.parallel.mesh import Groups


class ExpertParallel(LocalExperts):
    """The experts of a layer are sharded over `experts`, the tokens of a micro-batch over `tensor`."""

    def __init__(self, experts: DeviceMesh, tensor: DeviceMesh):
        self.experts, self.tensor = experts.get_group(), tensor.get_group()
        self.ranks, self.shards = experts.size(), tensor.size()

    def total(self, assigned: Tensor) -> Tensor:
        if self.shards == 1:
            return assigned
        total = assigned.clone()
        dist.all_reduce(total, group=self.tensor)
        return total

    def apply(self, experts: Experts, rows: Tensor, assigned: Tensor) -> Tensor:
        arriving = torch.empty_like(assigned)  # rows from each rank for each local expert, (W·E/W,)
        dist.all_to_all_single(arriving, assigned, group=self.experts)
        arriving = arriving.view(self.ranks, -1)
        rows_out = assigned.view(self.ranks, -1).sum(1).tolist()
        rows_in = arriving.sum(1).tolist()
        arrived = all_to_all_single_autograd(rows, rows_in, rows_out, self.experts)  # (Q,D) by rank, then by expert
        order = by_expert(arriving)
        out = experts(arrived[order], arriving.sum(0))
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return all_to_all_single_autograd(out[back], rows_out, rows_in, self.experts)

    def own(self, weight: Tensor) -> Tensor:
        assert isinstance(weight, DTensor)
        return weight.to_local()


def by_expert(arriving: Tensor) -> Tensor:
    """The permutation that groups rows by expert, which arrive by rank, then by expert. (W,E/W) -> (Q,)"""
    ranks, experts = arriving.shape
    which = torch.arange(experts, device=arriving.device).repeat(ranks)
    return which.repeat_interleave(arriving.flatten()).argsort(stable=True)


def distribute_experts(unit: nn.Module, groups: Groups) -> None:
    """Shard the experts of every MoE layer in `unit`, whose weights are still replicated."""
    for module in unit.modules():
        if isinstance(module, MoE):
            module.placement = ExpertParallel(groups.experts, groups.tensor)
            for name in module.matrices:
                whole: Tensor = getattr(module, name)
                shard = distribute_tensor(whole.detach(), groups.experts, [Shard(0)], src_data_rank=None)
                setattr(module, name, nn.Parameter(shard))
