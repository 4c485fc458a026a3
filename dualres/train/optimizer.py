"""AdamW and the learning-rate schedule of the paper's recipe: which parameters decay, warmup and cosine decay."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dualres.config.schema import TrainConfig


def optimizer_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for any AdamW: matrices decay; norms, biases, queries, gates and scales do not.

    `torch.optim.AdamW(optimizer_groups(model, 0.1), lr=3e-4)`, after the model is sharded, if it is. A parameter
    decays if it acts as a matrix, in your modules as in ours:

    - the weight of `nn.Linear` and `nn.Embedding`
    - a parameter of two or more dimensions with "weight" in its name, such as the weight of a convolution or the
      `in_proj_weight` of `nn.MultiheadAttention`, except in a norm
    - in a module with an attribute `matrices`, a tuple of names: the parameters that it names, and no other

    Position tables, class tokens and the like do not decay. A tied parameter is in one group, a frozen one in none.
    Parameters on different device meshes are in different groups, since fused AdamW cannot mix them.
    """
    matrices = {id(p) for p in _matrices(model)}
    groups: dict[Any, list[Tensor]] = {}
    for decays in (True, False):
        for p in model.parameters():
            if p.requires_grad and (id(p) in matrices) == decays:
                mesh = getattr(p, "device_mesh", None)  # of a DTensor, whose import has effects on the process
                groups.setdefault((decays, mesh), []).append(p)
    return [{"params": group, "weight_decay": weight_decay if decays else 0.0} for (decays, _), group in groups.items()]


def _matrices(model: nn.Module) -> Iterator[Tensor]:
    """Parameters that act as matrices, by role rather than shape: a gate has as many dimensions as a convolution."""
    for module in model.modules():
        declared = getattr(module, "matrices", None)
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(declared, tuple):
                is_matrix = name in declared
            elif isinstance(module, nn.Linear | nn.Embedding):
                is_matrix = name == "weight"
            else:
                is_norm = isinstance(module, nn.LayerNorm | nn.RMSNorm)
                is_matrix = "weight" in name and parameter.ndim >= 2 and not is_norm
            if is_matrix:
                yield parameter


def learning_rate(step: int, steps: int, train: TrainConfig) -> float:
    """The learning rate at step 0, 1, …: linear warmup to the peak, then cosine decay to the minimum at the end."""
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, steps - 1 - train.warmup_steps)
    cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return train.min_learning_rate + (train.learning_rate - train.min_learning_rate) * cosine


def adamw(model: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """AdamW with the recipe's settings; the loop sets the learning rate at every step.

    Parameters on the meta device belong to another pipeline rank, which optimizes them.
    """
    groups = optimizer_groups(model, train.weight_decay)
    for group in groups:
        group["params"] = [p for p in group["params"] if not p.is_meta]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=train.betas, eps=train.adam_eps, fused=True)


def fresh_state(parameter: Tensor) -> dict[str, Tensor]:
    """AdamW's state for a parameter before its first step."""
    return {
        "step": torch.zeros((), device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
    }
