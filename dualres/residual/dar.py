"""Dual Attention Residuals: each stream attends over depth, keys from the other stream, values from its own history."""
# B batch  T tokens  D width  U parameter sets

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from dualres import ops
from dualres.ops import GateParameters, Live, Norm, Route
from dualres.residual.gate import Gate, gate_parameters
from dualres.residual.live import appended, shortened
from dualres.residual.pathway import Place
from dualres.residual.retrieval import RetrievalOptions, RetrievalPathway, RetrievalState
from dualres.residual.route import DUAL


@dataclass(frozen=True)
class DualOptions(RetrievalOptions):
    """Initial values of DAR's gates."""

    gate_scale: float = 1.0
    """initial scale of the gates' input-dependent part; 0 starts as the standard Transformer"""
    rho_bias: float = 2.0
    """initial bias of ρ; 0 averages the two streams at every write, larger values keep them apart"""


class Dual(RetrievalPathway):
    """DAR. `route` assigns the key and value streams; the paper's ablations differ in nothing else.

    h^j = Σ_r π_r^j v_r^j;   h = α⁰h⁰ + α¹h¹;   P^i = M(ρ) P^{i−1} + [β⁰u, β¹u]
    α = σ(s_α (Norm([h⁰; h¹]) W_α) + b_α);   β = 2σ(s_β (Norm([h⁰; h¹]) W_β) + b_β)
    ρ = σ(s_ρ (Norm([P⁰; P¹]) W_ρ) + b_ρ) with P = P^{i−1}
    """

    replayable = True

    def __init__(self, dim: int, place: Place, *, eps: float, gate_scale: float, rho_bias: float, route: Route = DUAL):
        if place.branches == 1:
            raise ValueError(
                "every DAR block, including the last, needs at least 2 branches: with one, its state [β⁰u, β¹u] has "
                "collinear streams. Use a branches_per_block ≥ 2 that leaves no single-branch block"
            )
        super().__init__(dim, place, eps=eps, route=route)
        with_live = place.sets_with_live_state()
        self.gates = nn.ModuleList(
            GateSet(dim, transports=u in with_live, gate_scale=gate_scale, rho_bias=rho_bias, eps=eps)
            for u in sorted(set(place.set_of_branch))
        )

    def gate_tensors(self) -> tuple[tuple[GateParameters, ...], ...]:
        """α, β and ρ of each parameter set, without ρ if no branch of the set reads a live state."""
        return tuple([cast(GateSet, gates).tensors() for gates in self.gates._modules.values()])

    def read(self, state: RetrievalState, i: int, norm: Norm | None = None) -> tuple[Tensor, RetrievalState]:
        """Merge history and live state, h = α⁰h⁰ + α¹h¹; β and M(ρ) wait in the coefficients until the write."""
        u, live = self.set_of_branch[i], state.live and shortened(state.live)
        gates = state.gates[u] if live else state.gates[u][:2]
        h, prefix, next_live = ops.gated_read(
            state.prefixes[u], live, query=state.queries[u], gates=gates, route=self.route, eps=self.eps, norm=norm
        )
        return h, state.after_read(u, prefix, next_live)

    def write(self, state: RetrievalState, i: int, update: Tensor) -> RetrievalState:
        """P¹ = [β⁰u, β¹u], then P^i = M(ρ) P^{i−1} + [β⁰u, β¹u]"""
        update = update.to(state.prefixes[0].retrieved.dtype)
        return state.with_live(appended(cast(Live, state.live), update))

    def write_weights(self, state: RetrievalState) -> Tensor:
        """β (2,B,T)"""
        return cast(Live, state.live).coefficients[-1]


class GateSet(nn.Module):
    """The gates of one parameter set; ρ exists only if a branch of the set reads a live state."""

    def __init__(self, dim: int, *, transports: bool, gate_scale: float, rho_bias: float, eps: float):
        super().__init__()
        self.alpha = Gate(2, dim, 2, scale=gate_scale, bias=0.0, eps=eps)
        self.beta = Gate(2, dim, 2, scale=gate_scale, bias=0.0, eps=eps)
        self.rho = Gate(2, dim, 1, scale=gate_scale, bias=rho_bias, eps=eps) if transports else None

    def tensors(self) -> tuple[GateParameters, ...]:
        """Of α, β and ρ."""
        own: Any = self._modules
        return tuple([gate_parameters(own[name]) for name in ("alpha", "beta", "rho") if name in own])
