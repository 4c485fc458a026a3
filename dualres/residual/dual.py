"""Dual Attention Residuals: two streams; the other stream's states choose the depths, the own history is returned."""
# B batch  T tokens  D width  U parameter sets

from typing import cast

from torch import Tensor, nn

from dualres import ops
from dualres.ops import GateParameters, Norm
from dualres.residual.gates import Gate
from dualres.residual.live import Live
from dualres.residual.pathway import Place
from dualres.residual.retrieval import Retrieving, State
from dualres.residual.route import DUAL, Route


class Dual(Retrieving):
    """DAR. `route` says which stream is scored and which is returned; the ablations differ in nothing else.

    h^j = Σ_r π_r^j v_r^j;   h = α⁰h⁰ + α¹h¹;   P^i = M(ρ) P^{i−1} + [β⁰u, β¹u]
    """

    def __init__(self, dim: int, place: Place, *, eps: float, gate_scale: float, rho_bias: float, route: Route = DUAL):
        if place.branches == 1:
            raise ValueError(
                "a DAR block of a single branch u (any, also the last block) has the state [β⁰u, β¹u], whose two "
                "streams are collinear and tell nothing of each other: use branches_per_block 2 or more, and a number "
                "that leaves no branch alone"
            )
        super().__init__(dim, place, eps=eps, route=route)
        with_live = place.sets_with_live_state()
        self.gates = nn.ModuleList(
            GateSet(dim, transports=u in with_live, gate_scale=gate_scale, rho_bias=rho_bias, eps=eps)
            for u in sorted(set(place.set_of_branch))
        )

    def read(self, state: State, i: int, norm: Norm | None = None) -> tuple[Tensor, State]:
        """h = α⁰h⁰ + α¹h¹ with α = σ(·), and for the write β = 2σ(·), both from Norm([h⁰; h¹]); ρ = σ(·) from P.

        β and M(ρ) ride in the coefficients of the live streams until the write.
        """
        updates, coefficients = state.live.short() if state.live else ((), None)
        u = self.set_of_branch[i]
        gates = cast(GateSet, self.gates[u]).parameters_of(transports=bool(updates))
        query = self.query(i) if updates else None
        h, left = ops.gated_read(
            state.retrieved[u], state.log_partition[u], updates, coefficients, query, gates, self.route, self.eps, norm
        )
        return h, state._replace(live=Live(updates, left))

    def write(self, state: State, i: int, update: Tensor) -> State:
        """P¹ = [β⁰u, β¹u], then P^i = M(ρ) P^{i−1} + [β⁰u, β¹u]"""
        updates, coefficients = cast(Live, state.live)
        return state._replace(live=Live((*updates, update.to(state.retrieved[0].dtype)), coefficients))

    def write_weights(self, state: State) -> Tensor:
        """β (2,B,T)"""
        return cast(Live, state.live).coefficients[-1]


class GateSet(nn.Module):
    """The gates of one parameter set; ρ only where a branch of the set finds a live state to transport."""

    def __init__(self, dim: int, *, transports: bool, gate_scale: float, rho_bias: float, eps: float):
        super().__init__()
        self.alpha = Gate(2, dim, 2, scale=gate_scale, bias=0.0, eps=eps)
        self.beta = Gate(2, dim, 2, scale=gate_scale, bias=0.0, eps=eps)
        self.rho = Gate(2, dim, 1, scale=gate_scale, bias=rho_bias, eps=eps) if transports else None

    def parameters_of(self, transports: bool) -> list[GateParameters]:
        """α, β and, for a branch that finds a live state, ρ."""
        gates = [self.alpha, self.beta, *([cast(Gate, self.rho)] if transports else [])]
        return [gate.as_parameters() for gate in gates]
