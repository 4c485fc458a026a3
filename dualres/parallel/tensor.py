"""Tensor and sequence parallelism: weights sharded along heads, hidden units and vocabulary; tokens along the sequence.

Between branches a rank has T/n of every sequence, residual stream and history state: pathways are token-wise and need
no communication. A branch all-gathers its input once and reduce-scatters its output; an MoE branch routes its local
tokens. A parameter is either sharded, with a complete gradient, or replicated, with a gradient still to be summed
(`dualres.parallel.gradients`).
"""
# B batch  T tokens  D width

from typing import Any

from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
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
    return out.wait() if isinstance(out, AsyncCollectiveTensor) and not out.requires_grad else out


def shard_vocabulary(vocabulary: Vocabulary, mesh: DeviceMesh) -> None:
    """Shard the table, and untied output weights, along the vocabulary.

    The input tokens are replicated; the embeddings are sharded along the sequence.
    """
    plan: dict[str, ParallelStyle] = {"table": RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE)}
    if vocabulary.output is not None:
        plan["output"] = ColwiseParallel()
    parallelize_module(vocabulary, mesh, plan, src_data_rank=None)
    vocabulary.table.register_forward_hook(wait_for_output)
