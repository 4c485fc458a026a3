"""mHC-n, manifold-constrained hyper-connections: n streams, read, mixed and written by token-wise gates."""
# B batch  T tokens  D width  N streams

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualres import ops
from dualres.residual.gates import Gate
from dualres.residual.pathway import History, Pathway, Place

OFF_DIAGONAL = -8.0  # 0 would average the streams at every branch and cripple the baseline


class State(NamedTuple):
    """The live streams X (N,B,T,D)."""

    live: Tensor


class Gated(NamedTuple):
    """The state between a read and its write: with the gates that the write applies."""

    live: Tensor  # (N,B,T,D)
    mixing: Tensor  # (N,N,B,T) doubly stochastic
    post: Tensor  # (N,B,T)


class HyperConnections(Pathway):
    """X ← H_res X + H_post u, u = f(Σ_j H_pre^j X^j), with H_res on the doubly stochastic matrices.

    H_pre = σ(·), H_post = 2σ(·), H_res = Sinkhorn(exp(·)), each with its own scale, from one norm over all streams.
    """

    def __init__(self, dim: int, place: Place, *, streams: int, gate_scale: float, sinkhorn_steps: int, eps: float):
        super().__init__()
        self.sinkhorn_steps = sinkhorn_steps
        diagonal = (OFF_DIAGONAL * (1 - torch.eye(streams, device="cpu"))).flatten()

        def gates(values: int, bias: float | Tensor) -> nn.ModuleList:
            made = (Gate(streams, dim, values, scale=gate_scale, bias=bias, eps=eps) for _ in place.sets)
            return nn.ModuleList(made)

        self.pre = gates(streams, bias=0.0)
        self.post = gates(streams, bias=0.0)
        self.mixing = gates(streams * streams, bias=diagonal)

    def open(self, history: History) -> State:
        """The block goes on from the streams of the one before."""
        return State(history[-1])

    def read(self, state: State, i: int) -> tuple[Tensor, Gated]:
        """h = Σ_j σ(·)^j X^j; the gates of the write are computed from the same X."""
        live = state.live
        pre = torch.sigmoid(self.pre[i](live))
        post = 2 * torch.sigmoid(self.post[i](live))
        square = (len(live), *live.shape[:-1])  # (N,N,B,T)
        mixing = ops.sinkhorn(self.mixing[i](live).view(square), self.sinkhorn_steps)
        return ops.mix(pre, live), Gated(live, mixing, post)

    def write(self, state: Gated, i: int, update: Tensor) -> State:
        """X ← H_res X + H_post u"""
        written = ops.gated_write(state.post, update.to(state.live.dtype))
        return State(ops.mix_streams(state.mixing, state.live) + written)
