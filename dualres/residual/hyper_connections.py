"""mHC-n, manifold-constrained hyper-connections: n streams, read, mixed and written by token-wise gates."""
# B batch  T tokens  D width  N streams

from dataclasses import dataclass
from typing import Annotated, NamedTuple, cast

import torch
from torch import Tensor, nn

from dualres import ops
from dualres.config.validation import Bounds
from dualres.ops import Live, Norm
from dualres.residual.gate import Gate
from dualres.residual.live import appended, of_streams, shortened
from dualres.residual.pathway import History, Options, Pathway, Place

OFF_DIAGONAL = -8.0  # 0 would average the streams at every branch and cripple the baseline


@dataclass(frozen=True)
class HyperOptions(Options):
    """Options of mHC's streams and gates."""

    streams: Annotated[int, Bounds(minimum=1, maximum=64)] = 4  # a token's mixing matrix is streams × streams
    """residual streams, n"""
    gate_scale: float = 0.01
    """initial scale of the gates' input-dependent part; 0 starts as the standard Transformer"""
    sinkhorn_steps: Annotated[int, Bounds(minimum=1, maximum=1000)] = 20
    """Sinkhorn iterations, each a scaling of columns and rows"""


class HyperState(NamedTuple):
    """The live streams X, a weighted sum of the block's input streams and its branch outputs."""

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
            branches = place.set_of_branch
            return nn.ModuleList(Gate(streams, dim, values, scale=gate_scale, bias=bias, eps=eps) for _ in branches)

        self.pre = gates(streams, bias=0.0)
        self.post = gates(streams, bias=0.0)
        self.mixing = gates(streams * streams, bias=diagonal)

    def open(self, history: History) -> HyperState:
        """The block continues from the previous block's streams."""
        return HyperState(of_streams(history[-1]))

    def read(self, state: HyperState, i: int, norm: Norm | None = None) -> tuple[Tensor, HyperState]:
        """h = Σ_j σ(·)^j X^j; the gates of the write are computed from the same X.

        H_res and H_post are stored in the live streams' coefficients until the write.
        """
        gates = [cast(Gate, kind[i]) for kind in (self.pre, self.post, self.mixing)]
        live = shortened(state.live)
        h, next_live = ops.hyper_read(live, gates=gates, steps=self.sinkhorn_steps, eps=self.eps, norm=norm)
        return h, HyperState(next_live)

    def write(self, state: HyperState, i: int, update: Tensor) -> HyperState:
        """X ← H_res X + H_post u"""
        return HyperState(appended(state.live, update.to(state.live.updates[0].dtype)))

    def write_weights(self, state: HyperState) -> Tensor:
        """H_post (N,B,T)"""
        return state.live.coefficients[-1]

    def start_divisor(self, i: int) -> float:
        """At the zero start, h sums N streams, each the standard residual's state, weighted by σ(0) = ½."""
        return 2 / self.count
