"""Depth retrieval: how much every branch reads of each earlier state, and how far its two streams disagree.

Fused operators never store the weights π, so they are computed anew, by the reference, for the analysed tokens.
"""
# B batch  T tokens  R candidates  O output streams  N blocks  L layers

import math
from typing import Any

import torch
from torch import Tensor, nn

from dualres import ops
from dualres.analyze.taps import Site, Watcher
from dualres.analyze.token_means import Means
from dualres.residual.pathway import History, Pathway
from dualres.residual.retrieval import Retrieval, Retrieving

OUTPUT = -1  # the readout's place among the branches: before them


class DepthWeights(Watcher):
    """Means over all tokens of π and of the Jensen–Shannon divergence between two streams' π."""

    def __init__(self) -> None:
        self.weights = Means()  # by branch (O,R)
        self.divergence = Means()  # by branch ()

    def read(self, site: Site, pathway: Pathway, history: History, before: Any, after: Any) -> None:
        """Candidates are the history and, after the first write of a block, its live streams."""
        if not isinstance(pathway, Retrieving):
            return
        live = pathway.streams(before)
        query = pathway.query(site.i)
        candidates = [*history, *([] if live is None else [live])]
        if query is None:  # H_0 alone, and so no query
            query = candidates[0].new_zeros(len(pathway.route.key), candidates[0].shape[-1])
        self._add(site.branch, ops.depth_weights(candidates, query[None], route=pathway.route, eps=pathway.eps))

    def reads_out(self, readout: nn.Module, history: History) -> None:
        """The output's candidates are all of H_0 … H_N."""
        if isinstance(readout, Retrieval):
            self._add(OUTPUT, ops.depth_weights(history, readout.queries(), route=readout.route, eps=readout.eps))

    def _add(self, branch: int, weights: Tensor) -> None:
        """weights (R,1,O,B,T)"""
        seen = weights.detach()[:, 0].flatten(2).transpose(0, 1).double()  # (O,R,B·T)
        self.weights.add(branch, seen)
        if len(seen) == 2:
            self.divergence.add(branch, jensen_shannon(*seen))

    def maps(self) -> tuple[Tensor, Tensor] | None:
        """Of every branch (2L,O,N+1) and of the output (O,N+1): the mean weight of H_0 … H_N, the live streams counting
        as the state that they will be; not a number where there is nothing to read. None without depth retrieval.
        """
        if not self.weights:
            return None
        output = self.weights[OUTPUT]
        _, *branches = self.weights.numbers()
        found = output.new_full((len(branches), *output.shape), math.nan)
        for branch in branches:
            row = self.weights[branch]
            found[branch, :, : row.shape[1]] = row
        return found, output

    def divergences(self) -> tuple[Tensor, Tensor] | None:
        """Of every branch (2L,) and of the output (), in nats; None where there are not two streams that retrieve."""
        if not self.divergence:
            return None
        output, *branches = self.divergence.stacked()
        return torch.stack(branches), output


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """½ KL(p ‖ m) + ½ KL(q ‖ m) with m = (p + q) / 2, in nats: 0 where they agree, ln 2 where they share nothing.

    (R,…), (R,…), both summing to one over R -> (…)
    """
    middle = (p + q) / 2
    return (torch.xlogy(p, p) + torch.xlogy(q, q)).sum(0) / 2 - torch.xlogy(middle, middle).sum(0)
