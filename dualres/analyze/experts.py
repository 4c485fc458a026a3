"""Expert load: how evenly each router uses its experts, measured from outside the model."""
# N tokens  E experts  L layers  k active experts

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dualres.analyze.taps import TokenMeans, Watcher
from dualres.model.moe import MoE, router_logits


class RouterChoices(Watcher):
    """Accumulates the choices of every router."""

    def __init__(self) -> None:
        self.share = TokenMeans()  # by layer: f_e, share of the assignments (E,)
        self.probability = TokenMeans()  # by layer: P_e (E,)

    @torch.no_grad()
    def on_route(self, moe: MoE, arguments: tuple[Any, ...]) -> None:
        """Route the layer's input as the layer is about to."""
        logits = router_logits(arguments[0].flatten(0, -2), moe.router.weight)  # (N,E)
        assigned = one_hot(logits.topk(moe.active, -1).indices, moe.experts).sum(1)  # (N,E)
        self.share.add(moe.layer, assigned.T / moe.active)
        self.probability.add(moe.layer, logits.softmax(-1).T)

    def arrays(self) -> dict[str, Tensor]:
        """f_e (L,E), which sums to one over experts, and E · Σ_e f_e P_e (L,), 1 for uniform routing."""
        if not self.share:
            return {}
        load = self.share.stacked()
        return {"expert_load": load, "auxiliary": load.shape[1] * (load * self.probability.stacked()).sum(1)}
