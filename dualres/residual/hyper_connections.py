"""mHC-n, manifold-constrained hyper-connections: n streams, read, mixed and written by token-wise gates."""
# B batch  T tokens  D width  N streams

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from dualres import ops
from dualres.ops import Norm
from dualres.residual.gates import Gate
from dualres.residual.live import Live, of_streams
from dualres.residual.pathway import History, Pathway, Place

OFF_DIAGONAL = -8.0  # 0 would average the streams at every branch and cripple the baseline


class State(NamedTuple):
    """The live streams X, a sum of the streams that the block started from and of its branch outputs."""

    live: Live


class HyperConnections(Pathway):
    """X ← H_res X + H_post u, u = f(Σ_j H_pre^j X^j), with H_res on the doubly stochastic matrices.

    H_pre = σ(·), H_post = 2σ(·), H_res = Sinkhorn(exp(·)), each with its own scale, from one norm over all streams.
    """

    def __init__(self, dim: int, place: Place, *, streams: int, gate_scale: float, sinkhorn_steps: int, eps: float):
        super().__init__()
        self.count, self.sinkhorn_steps, self.eps = streams, sinkhorn_steps, eps
        diagonal = (OFF_DIAGONAL * (1 - torch.eye(streams, device="cpu"))).flatten()

        def gates(values: int, bias: float | Tensor) -> nn.ModuleList:
            made = (Gate(streams, dim, values, scale=gate_scale, bias=bias, eps=eps) for _ in place.set_of_branch)
            return nn.ModuleList(made)

        self.pre = gates(streams, bias=0.0)
        self.post = gates(streams, bias=0.0)
        self.mixing = gates(streams * streams, bias=diagonal)

    def open(self, history: History) -> State:
        """The block goes on from the streams of the one before."""
        return State(of_streams(history[-1]))

    def read(self, state: State, i: int, norm: Norm | None = None) -> tuple[Tensor, State]:
        """h = Σ_j σ(·)^j X^j; the gates of the write are computed from the same X.

        H_res and H_post ride in the coefficients of the live streams until the write.
        """
        updates, coefficients = state.live.short()
        gates = [cast(Gate, kind[i]).as_parameters() for kind in (self.pre, self.post, self.mixing)]
        h, left = ops.hyper_read(updates, coefficients, gates, self.sinkhorn_steps, self.eps, norm)
        return h, State(Live(updates, left))

    def write(self, state: State, i: int, update: Tensor) -> State:
        """X ← H_res X + H_post u"""
        updates, coefficients = state.live
        return State(Live((*updates, update.to(updates[0].dtype)), coefficients))

    def write_weights(self, state: State) -> Tensor:
        """H_post (N,B,T)"""
        return state.live.coefficients[-1]

    def start_divisor(self, i: int) -> float:
        """N streams, each the standard residual's state, times σ(0) = ½."""
        return 2 / self.count

    def close(self, state: State) -> Tensor:
        """The streams that the next block starts from."""
        return state.live.streams()

    def streams(self, state: State) -> Tensor:
        """The live streams (N,B,T,D)."""
        return state.live.streams()

    def with_streams(self, state: State, live: Tensor) -> State:
        """The same state with other live streams (N,B,T,D)."""
        return State(of_streams(live))
