"""Attention Residuals: one stream; a branch reads a softmax over earlier states, chosen by a learned query."""
# B batch  T tokens  D width  J stored streams

import torch
from torch import Tensor, nn

from dualres import ops
from dualres.ops import Norm
from dualres.residual.live import plus
from dualres.residual.pathway import Place
from dualres.residual.retrieval import Retrieving, State
from dualres.residual.route import SINGLE, VALUE_PROJECTED, Route


class AttnRes(Retrieving):
    """h = Σ_r π_r v_r with π ∝ exp(q · Norm(k_r)); the live state is the sum of the block's branch outputs.

    With one branch per block it is the paper's full form, where every branch output is a candidate of its own.
    """

    def __init__(self, dim: int, place: Place, *, eps: float, route: Route = SINGLE):
        super().__init__(dim, place, eps=eps, route=route)

    def read(self, state: State, i: int, norm: Norm | None = None) -> tuple[Tensor, State]:
        """h_l = Σ_r π_{r→l} v_r: phase 2, the history merged with the live state, where there is one."""
        if state.live is not None:
            state = state._replace(live=state.live.short())
        updates, coefficients = state.live or ((), None)
        u = self.set_of_branch[i]
        retrieved, log_partition = state.retrieved[u], state.log_partition[u]
        query = self.query(i) if updates else None
        return ops.read(retrieved, log_partition, updates, coefficients, query, self.route, self.eps, norm), state

    def write(self, state: State, i: int, update: Tensor) -> State:
        """P^i = P^{i−1} + u"""
        return state._replace(live=plus(state.live, self.stored(i, update.to(state.retrieved[0].dtype))))

    def stored(self, i: int, update: Tensor) -> tuple[Tensor, ...]:
        """The output of branch i in the form that states are stored in. (B,T,D) -> J × (B,T,D)"""
        return (update,)


class ValueProjected(AttnRes):
    """AttnRes + VProj: states are stored as (v, W v); the first is scored, the second returned.

    Each branch output has a map W of its own, the embedding has none.
    """

    def __init__(self, dim: int, place: Place, *, eps: float, value_rank: int):
        if value_rank > dim:
            raise ValueError(f"value_rank={value_rank} exceeds the width {dim}: use 0, a full matrix, or a lower rank")
        super().__init__(dim, place, eps=eps, route=VALUE_PROJECTED)
        self.maps = nn.ModuleList(
            FullMap(dim) if value_rank == 0 else LowRankMap(dim, value_rank) for _ in place.set_of_branch
        )

    def stored(self, i: int, update: Tensor) -> tuple[Tensor, ...]:
        """[u, W_i u]"""
        return update, self.maps[i](update).to(update.dtype)


class FullMap(nn.Module):
    """W v with a d×d matrix that starts as the identity."""

    matrices = ("weight",)  # they decay, as the weights of `nn.Linear` do

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
    """(I + B A) v with A of `rank` rows; it starts as the identity, B = 0."""

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
