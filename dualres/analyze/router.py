"""Experts: how evenly a router uses them, seen from outside the model."""
# N tokens  E experts  L layers  k active experts

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dualres.model.block import NormedBranch, ResidualStack
from dualres.model.moe import MoE, router_logits


class Balance(NamedTuple):
    """Over all tokens that were watched."""

    load: Tensor  # (L,E): the share of the assignments, f_e, which sums to one over the experts
    auxiliary: Tensor  # (L,): E · Σ_e f_e P_e, 1 where routing is uniform


class RouterWatcher:
    """Adds up what every router chooses."""

    def __init__(self) -> None:
        self.assigned: dict[int, Tensor] = {}  # by layer (E,)
        self.probability: dict[int, Tensor] = {}  # by layer: the sum over tokens (E,)

    @torch.no_grad()
    def routed(self, moe: MoE, given: tuple[Any, ...]) -> None:
        """What the layer is about to do with its input."""
        logits = router_logits(given[0].flatten(0, -2), moe.router.weight)  # (N,E)
        chosen = logits.topk(moe.active, -1).indices.flatten()
        counts = torch.bincount(chosen, minlength=moe.experts).double()
        chances = logits.softmax(-1).double().sum(0)
        self.assigned[moe.layer] = self.assigned.get(moe.layer, torch.zeros(())) + counts
        self.probability[moe.layer] = self.probability.get(moe.layer, torch.zeros(())) + chances

    def balance(self) -> Balance | None:
        """None for a model without experts."""
        if not self.assigned:
            return None
        layers = sorted(self.assigned)
        load, probability = (
            torch.stack([sums[layer] / sums[layer].sum() for layer in layers])
            for sums in (self.assigned, self.probability)
        )
        return Balance(load, load.shape[1] * (load * probability).sum(1))


@contextmanager
def watching_routers(stack: ResidualStack, watcher: RouterWatcher) -> Iterator[None]:
    """Tell `watcher` what every MoE branch is given."""

    def routed(module: Any, given: tuple[Any, ...]) -> None:
        watcher.routed(module, given)

    modules = [cast(NormedBranch, branch).module for block in stack for branch in block.branches]
    hooks = [module.register_forward_pre_hook(routed) for module in modules if isinstance(module, MoE)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
