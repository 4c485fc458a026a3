"""Depth retrieval: how much each branch reads from each earlier state, and how much its two streams disagree.

Fused operators never materialize the weights π; `Pathway.depth_weights` recomputes them for the analyzed tokens.
"""
# B batch  T tokens  R candidates  O output streams  N blocks  L layers

import math
from typing import Any

import torch
from torch import Tensor

from dualres.analyze.taps import Site, TokenMeans, Watcher
from dualres.residual.pathway import History, Pathway

OUTPUT = -1  # key of the readout; branches count from 0


class DepthWeights(Watcher):
    """Means over all tokens of π, and of the Jensen–Shannon divergence between the π of two streams."""

    def __init__(self) -> None:
        self.weights = TokenMeans()  # by branch (O,R)
        self.divergence = TokenMeans()  # by branch ()
        self.history: History = ()  # of the current block

    def on_block_start(self, block: int, history: History) -> None:
        self.history = history

    def on_read(self, site: Site, pathway: Pathway, before: Any, after: Any) -> None:
        self._add(site.branch, pathway.depth_weights(self.history, before, site.i))

    def on_readout(self, readout: Any, history: History) -> None:
        self._add(OUTPUT, readout.depth_weights(history))
        self.history = ()  # frees the states

    def _add(self, branch: int, weights: Tensor | None) -> None:
        """weights (R,O,B,T), or None without depth retrieval"""
        if weights is None:
            return
        per_token = weights.detach().flatten(2).transpose(0, 1).double()  # (O,R,B·T)
        self.weights.add(branch, per_token)
        if len(per_token) == 2:
            self.divergence.add(branch, jensen_shannon(*per_token))

    def arrays(self) -> dict[str, Tensor]:
        """Mean weights of H_0 … H_N for every branch (2L,O,N+1) and for the output (O,N+1).

        The live streams count as the state they become. States that a branch cannot read are NaN. If two streams
        retrieve, also their divergence in nats, for every branch (2L,) and for the output ().
        """
        if not self.weights:
            return {}
        output = self.weights[OUTPUT]
        _, *branches = self.weights.keys()
        maps = output.new_full((len(branches), *output.shape), math.nan)
        for branch in branches:
            row = self.weights[branch]
            maps[branch, :, : row.shape[1]] = row
        arrays = {"retrieval": maps, "retrieval_output": output}
        if self.divergence:
            arrays["divergence_output"], *divergences = self.divergence.stacked()
            arrays["divergence"] = torch.stack(divergences)
        return arrays


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """½ KL(p ‖ m) + ½ KL(q ‖ m) with m = (p + q) / 2, in nats: 0 if p = q, ln 2 if their supports are disjoint.

    (R,…), (R,…), both summing to one over R -> (…)
    """
    middle = (p + q) / 2
    return (torch.xlogy(p, p) + torch.xlogy(q, q)).sum(0) / 2 - torch.xlogy(middle, middle).sum(0)
