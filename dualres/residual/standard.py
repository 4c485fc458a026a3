"""The standard residual: one stream, to which every branch output is added. h_{l+1} = h_l + f_l(h_l)"""

from typing import NamedTuple

from torch import Tensor

from dualres import ops
from dualres.ops import Norm
from dualres.residual.pathway import History, Pathway, Place


class StandardState(NamedTuple):
    """The live stream (1,B,T,D)."""

    live: Tensor


class Standard(Pathway):
    """h_{l+1} = h_l + f_l(h_l); no parameters."""

    def __init__(self, dim: int, place: Place, *, eps: float):
        super().__init__()

    def open(self, history: History) -> StandardState:
        """The block continues from the previous block's state."""
        return StandardState(history[-1])

    def read(self, state: StandardState, i: int, norm: Norm | None = None) -> tuple[Tensor, StandardState]:
        """h_l is the stream itself."""
        return ops.rms_norm(state.live, norm), state

    def start_divisor(self, i: int) -> float:
        """h_l is the standard residual's state itself."""
        return 1.0

    def write(self, state: StandardState, i: int, update: Tensor) -> StandardState:
        """h_l + f_l(h_l)"""
        return StandardState(state.live + update.to(state.live.dtype).unsqueeze(0))
