"""Sizes of the streams by depth: a stream that dies or explodes is seen here first."""
# B batch  T tokens  D width  J streams  L layers  N blocks

from typing import Any

import torch
from torch import Tensor

from dualres.analyze.tap import Site, Watcher
from dualres.ops.reference import wide
from dualres.residual.pathway import History, Pathway


class Norms(Watcher):
    """The mean over tokens of √(mean x²): of the streams after every MLP, and of the states H_0 … H_N."""

    def __init__(self) -> None:
        self.streams: dict[int, Tensor] = {}  # by layer: the sum over tokens (J,)
        self.history: dict[int, Tensor] = {}  # by block
        self.tokens = 0

    def opened(self, block: int, history: History) -> None:
        """The first block shows H_0."""
        if block == 0:
            self.tokens += history[0][0, ..., 0].numel()
            _add(self.history, 0, history[0])

    def written(self, site: Site, pathway: Pathway, state: Any) -> None:
        """Those of an MLP."""
        if site.ends_layer:
            streams = pathway.streams(state)
            assert streams is not None
            _add(self.streams, site.layer, streams)

    def closed(self, block: int, state: Tensor) -> None:
        """H_1 … H_N"""
        _add(self.history, block + 1, state)

    def means(self) -> tuple[Tensor, Tensor]:
        """Of the streams (L,J) and of the history (N+1,J)."""
        streams, history = (
            torch.stack([total for _, total in sorted(sums.items())]) for sums in (self.streams, self.history)
        )
        return streams / self.tokens, history / self.tokens


def _add(sums: dict[int, Tensor], at: int, state: Tensor) -> None:
    """state (J,B,T,D)"""
    sizes = wide(state.detach()).square().mean(-1).sqrt().double().sum((1, 2))
    sums[at] = sums[at] + sizes if at in sums else sizes
