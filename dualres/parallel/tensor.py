"""Tensor and sequence parallelism: weights cut along heads, hidden units and vocabulary; tokens along the sequence.

Between branches a rank has T/n of every sequence, and so of every residual stream and of the history: pathways are per
token and need no communication. A branch gathers its input once and scatters the sum of its output; an MoE branch
routes the tokens it has. A parameter is either cut, and its gradient complete, or whole on all ranks of the group, and
its gradient a part of a sum (`dualres.parallel.gradients`).
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
CUT: dict[type[nn.Module], tuple[tuple[str, ...], str]] = {  # maps into the hidden units, and the one out of them
    Attention: (("query", "key", "value"), "output"),
    FeedForward: (("gate", "up"), "down"),
}


def shard_branches(unit: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the weights of every attention and feed-forward in `unit`, which are whole on all ranks."""
    for module in unit.modules():
        if type(module) in CUT:
            into, out = CUT[type(module)]
            plan: dict[str, ParallelStyle] = {
                "": PrepareModuleInput(input_layouts=(SEQUENCE,), desired_input_layouts=(Replicate(),)),
                out: RowwiseParallel(output_layouts=SEQUENCE),
                **{name: ColwiseParallel() for name in into},
            }
            parallelize_module(module, mesh, plan, src_data_rank=None)
            module.register_forward_hook(arrived)


def arrived(module: nn.Module, given: Any, out: Tensor) -> Tensor:
    """A result that is there: PyTorch hands on a promise of it, which has no memory of its own for a kernel to read.

    Where gradients are recorded, operators see to it themselves (and waiting here would cut the record).
    """
    return out.wait() if isinstance(out, AsyncCollectiveTensor) and not out.requires_grad else out


def shard_vocabulary(vocabulary: Vocabulary, mesh: DeviceMesh) -> None:
    """Cut the table, and the output weights where they are others, along the vocabulary.

    Tokens come in whole and embeddings go out as shares of the sequence.
    """
    plan: dict[str, ParallelStyle] = {"table": RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE)}
    if vocabulary.output is not None:
        plan["output"] = ColwiseParallel()
    parallelize_module(vocabulary, mesh, plan, src_data_rank=None)
    vocabulary.table.register_forward_hook(arrived)
