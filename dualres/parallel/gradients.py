"""Completes gradients that FSDP2 has averaged over its own ranks, and their norm over the whole mesh.

A weight replicated over a tensor group has a gradient from each rank's part of the sequences: they are summed over the
group. Experts have the summed gradient of the tokens of all `expert` ranks: it is divided by their number. A tied
vocabulary is on the first and last stage of a pipeline: its gradients are summed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dualres.parallel.mesh import Groups


class MeshGradients:
    """The gradients of a rank, by the mesh dimensions that its parameters are sharded over."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], groups: Groups, tied: Sequence[str]):
        dims = {name: dimensions(parameter) for name, parameter in parameters.items()}
        partial = [p for name, p in parameters.items() if not {"tensor", "experts"} & dims[name]]
        self.groups = groups
        self.partial = partial if groups.sizes.tensor > 1 else []  # summed over the tensor group
        self.experts = [p for name, p in parameters.items() if "experts" in dims[name]]  # divided by the expert ranks
        self.tied = [parameters[name] for name in tied]  # summed over the first and the last stage
        # The number of ranks that hold the same shard.
        self.copies = {p: copies(p, groups) * (2 if name in tied else 1) for name, p in parameters.items()}

    def finish(self) -> None:
        """Complete the gradients, after the last micro-batch of a step."""
        if self.partial:
            all_reduce_together(gradients(self.partial), self.groups.tensor.get_group())
        if self.groups.sizes.expert > 1:
            for gradient in gradients(self.experts):
                gradient.div_(self.groups.sizes.expert)
        if self.tied and self.groups.ends is not None:
            all_reduce_together(gradients(self.tied), self.groups.ends)

    def squares(self) -> float:
        """This rank's part of the gradient's sum of squares: a shard that several ranks hold counts once."""
        held = [p for p in self.copies if p.grad is not None]
        if not held:
            return 0.0
        norms = torch.stack(torch._foreach_norm(gradients(held))).double().cpu()
        return (norms.square() / torch.tensor([self.copies[p] for p in held])).sum().item()

    def clip(self, norm: float, limit: float) -> None:
        """Scale the gradient down to the norm `limit`, as `clip_grad_norm_` does."""
        factor = limit / (norm + 1e-6)
        if factor < 1:
            torch._foreach_mul_(gradients(self.copies), factor)


def copies(parameter: Tensor, groups: Groups) -> int:
    """The number of ranks of a stage that hold the same shard."""
    if not isinstance(parameter, DTensor):
        return groups.sizes.data * groups.sizes.tensor
    placements = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    replicas = math.prod(size for placement, size in placements if placement.is_replicate())
    return replicas * (1 if {"tensor", "experts"} & dimensions(parameter) else groups.sizes.tensor)


def dimensions(parameter: Tensor) -> set[str]:
    """The mesh dimensions that a parameter is sharded over."""
    return set(parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else set()


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's shards of the gradients that exist."""
    grads = (p.grad for p in parameters if p.grad is not None)
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


def all_reduce_together(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """All-reduce tensors in place, in one collective."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
