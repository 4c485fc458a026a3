"""Attention Residuals: one stream; a branch reads the softmax-weighted sum of earlier states under a learned query."""
# B batch  T tokens  D width  J stored streams

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dualres import ops
from dualres.config.validation import NonNegativeInt
from dualres.ops import Norm, Route
from dualres.residual.live import plus, shortened
from dualres.residual.pathway import Place
from dualres.residual.retrieval import RetrievalOptions, RetrievalPathway, RetrievalState
from dualres.residual.route import SINGLE, VALUE_PROJECTED


class AttnRes(RetrievalPathway):
    """h = Σ_r π_r v_r with π ∝ exp(q · Norm(k_r)); the live state is the sum of the block's branch outputs.

    One branch per block gives the paper's full form, in which every branch output is its own candidate.
    """

    replayable = True

    def __init__(self, dim: int, place: Place, *, eps: float, route: Route = SINGLE):
        super().__init__(dim, place, eps=eps, route=route)

    def read(self, state: RetrievalState, i: int, norm: Norm | None = None) -> tuple[Tensor, RetrievalState]:
        """h_l = Σ_r π_{r→l} v_r: phase 2 merges the history with the live state, if there is one."""
        live = state.live and shortened(state.live)
        u = self.set_of_branch[i]
        prefix, query = state.prefixes[u], state.queries[u]
        h, prefix, live = ops.read(prefix, live, query=query, route=self.route, eps=self.eps, norm=norm)
        return h, state.after_read(u, prefix, live)

    def write(self, state: RetrievalState, i: int, update: Tensor) -> RetrievalState:
        """P^i = P^{i−1} + u"""
        return state.with_live(plus(state.live, self.stored(i, update.to(state.prefixes[0].retrieved.dtype))))

    def stored(self, i: int, update: Tensor) -> tuple[Tensor, ...]:
        """The output of branch i in the form that states are stored in. (B,T,D) -> J × (B,T,D)"""
        return (update,)


@dataclass(frozen=True)
class ValueProjectedOptions(RetrievalOptions):
    """Options of the value maps of AttnRes + VProj."""

    value_rank: NonNegativeInt = 0
    """rank r of the maps I + BA on the values; 0: full d×d matrices"""


class ValueProjected(AttnRes):
    """AttnRes + VProj: states are stored as (v, W v); v serves as the key, W v as the value.

    Each branch output has its own map W; the embedding has none.
    """

    def __init__(self, dim: int, place: Place, *, eps: float, value_rank: int):
        if value_rank > dim:
            raise ValueError(f"value_rank={value_rank} exceeds the width {dim}: use 0 (a full matrix) or a lower rank")
        super().__init__(dim, place, eps=eps, route=VALUE_PROJECTED)
        self.maps = nn.ModuleList(
            FullMap(dim) if value_rank == 0 else LowRankMap(dim, value_rank) for _ in place.set_of_branch
        )

    def stored(self, i: int, update: Tensor) -> tuple[Tensor, ...]:
        """[u, W_i u]"""
        return update, self.maps[i](update).to(update.dtype)


class FullMap(nn.Module):
    """W v with a d×d matrix W, initialized to the identity."""

    matrices = ("weight",)  # subject to weight decay, like the weights of `nn.Linear`

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dim))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """W = I"""
        nn.init.eye_(self.weight)

    def forward(self, value: Tensor) -> Tensor:
        """(B,T,D) -> (B,T,D)"""
        return nn.functional.linear(value, self.weight)


class LowRankMap(nn.Module):
    """(I + B A) v with A of `rank` rows; initialized to the identity by B = 0."""

    matrices = ("down", "up")

    def __init__(self, dim: int, rank: int):
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, dim))
        self.up = nn.Parameter(torch.empty(dim, rank))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """A ~ N(0, 0.02), B = 0"""
        nn.init.normal_(self.down, std=0.02, generator=generator)
        nn.init.zeros_(self.up)

    def forward(self, value: Tensor) -> Tensor:
        """(B,T,D) -> (B,T,D)"""
        return value + nn.functional.linear(nn.functional.linear(value, self.down), self.up)
