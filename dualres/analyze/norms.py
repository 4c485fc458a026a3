"""RMS of the streams by depth, where a collapsing or exploding stream shows up first."""
# B batch  T tokens  D width  J streams  L layers  N blocks

from typing import Any

from torch import Tensor

from dualres.analyze.taps import Site, TokenMeans, Watcher
from dualres.ops.reference import to_accumulation_dtype
from dualres.residual.pathway import History, Pathway


class Norms(Watcher):
    """Mean over tokens of √(mean x²): of the streams after every MLP, and of the states H_0 … H_N."""

    def __init__(self) -> None:
        self.streams = TokenMeans()  # by layer (J,)
        self.history = TokenMeans()  # by state (J,)

    def on_block_start(self, block: int, history: History) -> None:
        if block == 0:
            self.history.add(0, _rms(history[0]))

    def on_write(self, site: Site, pathway: Pathway, state: Any) -> None:
        if site.ends_layer:
            streams = pathway.streams(state)
            assert streams is not None
            self.streams.add(site.layer, _rms(streams))

    def on_block_end(self, block: int, state: Tensor) -> None:
        self.history.add(block + 1, _rms(state))

    def arrays(self) -> dict[str, Tensor]:
        """Mean RMS of the streams (L,J) and of the history (N+1,J)."""
        return {"stream_rms": self.streams.stacked(), "history_rms": self.history.stacked()}


def _rms(state: Tensor) -> Tensor:
    """(J,B,T,D) -> (J,B·T)"""
    return to_accumulation_dtype(state).square().mean(-1).sqrt().flatten(1)
