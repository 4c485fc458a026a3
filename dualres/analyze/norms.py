"""Sizes of the streams by depth: a stream that dies or explodes is seen here first."""
# B batch  T tokens  D width  J streams  L layers  N blocks

from typing import Any

from torch import Tensor

from dualres.analyze.taps import Site, Watcher
from dualres.analyze.token_means import Means
from dualres.ops.reference import to_accumulation_dtype
from dualres.residual.pathway import History, Pathway


class Norms(Watcher):
    """The mean over tokens of √(mean x²): of the streams after every MLP, and of the states H_0 … H_N."""

    def __init__(self) -> None:
        self.streams = Means()  # by layer (J,)
        self.history = Means()  # by state (J,)

    def opened(self, block: int, history: History) -> None:
        """The first block shows H_0."""
        if block == 0:
            self.history.add(0, _sizes(history[0]))

    def written(self, site: Site, pathway: Pathway, state: Any) -> None:
        """Those of an MLP."""
        if site.ends_layer:
            streams = pathway.streams(state)
            assert streams is not None
            self.streams.add(site.layer, _sizes(streams))

    def closed(self, block: int, state: Tensor) -> None:
        """H_1 … H_N"""
        self.history.add(block + 1, _sizes(state))

    def means(self) -> tuple[Tensor, Tensor]:
        """Of the streams (L,J) and of the history (N+1,J)."""
        return self.streams.stacked(), self.history.stacked()


def _sizes(state: Tensor) -> Tensor:
    """(J,B,T,D) -> (J,B·T)"""
    return to_accumulation_dtype(state).square().mean(-1).sqrt().flatten(1)
