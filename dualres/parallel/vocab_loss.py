"""Cross-entropy over a vocabulary that is sharded into ranges: no rank ever materializes the full logits.

    log Z_n = log Σ_ranks exp(log Z_n of the rank's entries)

Each rank sends two numbers per token: the log-partition of its range and, if the target is in it, its logit.
"""
# B batch  T tokens  N = B·T  E table width  V size of this rank's range

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_single, reduce_scatter_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dualres.model.loss import ChunkedCrossEntropy, loss_and_gradients


def vocabulary_loss(mesh: DeviceMesh, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
    """The mean cross-entropy of hidden states sharded along the sequence and weights along the vocabulary.

    hidden (B,T/n,E), weight a DTensor (vocabulary,E), targets (B,T) -> (), the same on all ranks
    """
    assert isinstance(weight, DTensor)
    first = mesh.get_local_rank() * -(-weight.shape[0] // mesh.size())
    return VocabParallelCrossEntropy.apply(hidden, weight.to_local(), targets - first, rows, mesh.get_group())


class VocabParallelCrossEntropy(ChunkedCrossEntropy):
    """`ChunkedCrossEntropy` for one rank's range of the vocabulary."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, group: dist.ProcessGroup
    ) -> Tensor:
        """targets (B,T) count from the start of the range: outside 0 … V−1 they belong to another rank."""
        whole = all_gather_single(hidden.contiguous(), gather_dim=1, group=group).flatten(0, 1)  # (N,E)
        inside = (targets >= 0) & (targets < len(weight))
        loss, grad_whole, grad_weight = loss_and_gradients(
            whole,
            weight,
            targets.where(inside, 0).flatten(),
            rows,
            differentiated=any(ctx.needs_input_grad),
            inside=inside.flatten(),
            reduce_over_ranks=lambda log_partition, target_logit: reduce_over_ranks(log_partition, target_logit, group),
        )
        if grad_whole is not None:
            grad_hidden = reduce_scatter_single(grad_whole.view(*targets.shape, -1), "sum", 1, group)
            ctx.save_for_backward(wait_tensor(grad_hidden), grad_weight)
        return loss


def reduce_over_ranks(log_partition: Tensor, target_logit: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The log-partition of the whole vocabulary, and the target's logit from its rank. Two of (rows,1)"""
    own = torch.stack([log_partition, target_logit])  # (2,rows,1)
    every = all_gather_single(own, gather_dim=2, group=group)  # (2,rows,n)
    return every[0].logsumexp(-1, keepdim=True), every[1].sum(-1, keepdim=True)
