"""The standard residual: one stream, to which every branch output is added. h_{l+1} = h_l + f_l(h_l)"""

from typing import NamedTuple

from torch import Tensor

from dualres import ops
from dualres.ops import Norm
from dualres.residual.pathway import History, Pathway, Place


class State(NamedTuple):
    """The live stream (1,B,T,D)."""

    live: Tensor


class Standard(Pathway):
    """h_{l+1} = h_l + f_l(h_l); no parameters."""

    def __init__(self, dim: int, place: Place, *, eps: float):
        super().__init__()

    def open(self, history: History) -> State:
        """The block goes on from the state of the one before."""
        return State(history[-1])

    def read(self, state: State, i: int, norm: Norm | None = None) -> tuple[Tensor, State]:
        """h_l is the stream itself."""
        return ops.normed(state.live, norm), state

    def start_divisor(self, i: int) -> float:
        """It is the standard residual's state."""
        return 1.0

    def write(self, state: State, i: int, update: Tensor) -> State:
        """h_l + f_l(h_l)"""
        return State(state.live + update.to(state.live.dtype).unsqueeze(0))
