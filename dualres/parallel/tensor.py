"""Tensor and sequence parallelism: weights sharded along heads, hidden units and vocabulary; tokens along the sequence.

Between branches a rank has T/n of every sequence, residual stream and history state: pathways are token-wise and need
no communication. A branch all-gathers its input once and reduce-scatters its output; an MoE branch routes its local
tokens. A parameter is either sharded, with a complete gradient, or replicated, with a gradient still to be summed
(by `ShardedEngine` in `dualres.train.engines.fsdp`).

The cross-entropy never materializes the full logits. Each rank sends two numbers per token: the log-partition of its
range of the vocabulary and, if the target is in it, its logit.

    log Z_n = log Σ_ranks exp(log Z_n of the rank's entries)
"""
# B batch  T tokens  N = B·T  D width  E table width  V size of this rank's range of the vocabulary

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from dualres.model.attention import Attention
from dualres.model.decoder import Vocabulary
from dualres.model.feedforward import FeedForward
from dualres.model.loss import ChunkedCrossEntropy, loss_and_gradients

SEQUENCE = Shard(1)  # of (B,T,D)
LINEARS: dict[type[nn.Module], tuple[tuple[str, ...], str]] = {  # column-parallel maps, and the row-parallel one
    Attention: (("query", "key", "value"), "output"),
    FeedForward: (("gate", "up"), "down"),
}


def shard_branches(unit: nn.Module, mesh: DeviceMesh) -> None:
    """Shard every attention and feed-forward in `unit`, whose weights are still replicated."""
    for module in unit.modules():
        if type(module) in LINEARS:
            into, out = LINEARS[type(module)]
            plan: dict[str, ParallelStyle] = {
                "": PrepareModuleInput(input_layouts=(SEQUENCE,), desired_input_layouts=(Replicate(),)),
                out: RowwiseParallel(output_layouts=SEQUENCE),
                **{name: ColwiseParallel() for name in into},
            }
            parallelize_module(module, mesh, plan, src_data_rank=None)
            module.register_forward_hook(wait_for_output)


def wait_for_output(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
    """Wait for an asynchronous collective: until it ends, its result has no memory that a kernel could read.

    With gradients, operators wait by themselves, and waiting here would detach the output.
    """
    return out.wait() if isinstance(out, collectives.AsyncCollectiveTensor) and not out.requires_grad else out


def shard_vocabulary(vocabulary: Vocabulary, mesh: DeviceMesh) -> None:
    """Shard the table, and untied output weights, along the vocabulary.

    The input tokens are replicated; the embeddings are sharded along the sequence.
    """
    plan: dict[str, ParallelStyle] = {"table": RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE)}
    if vocabulary.output is not None:
        plan["output"] = ColwiseParallel()
    parallelize_module(vocabulary, mesh, plan, src_data_rank=None)
    vocabulary.table.register_forward_hook(wait_for_output)


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
        whole = collectives.all_gather_single(hidden.contiguous(), gather_dim=1, group=group).flatten(0, 1)  # (N,E)
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
            grad_hidden = collectives.reduce_scatter_single(grad_whole.view(*targets.shape, -1), "sum", 1, group)
            ctx.save_for_backward(collectives.wait_tensor(grad_hidden), grad_weight)
        return loss


def reduce_over_ranks(log_partition: Tensor, target_logit: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The log-partition of the whole vocabulary, and the target's logit from its rank. Two of (rows,1)"""
    own = torch.stack([log_partition, target_logit])  # (2,rows,1)
    every = collectives.all_gather_single(own, gather_dim=2, group=group)  # (2,rows,n)
    return every[0].logsumexp(-1, keepdim=True), every[1].sum(-1, keepdim=True)
