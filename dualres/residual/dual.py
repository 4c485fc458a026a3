"""Dual Attention Residuals: two streams; the other stream's states choose the depths, the own history is returned."""
# B batch  T tokens  D width  U parameter sets

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from dualres import ops
from dualres.residual.gates import Gate
from dualres.residual.pathway import Place
from dualres.residual.retrieval import Retrieving, State
from dualres.residual.route import DUAL, Route


class Gated(NamedTuple):
    """The state between a read and its write: with the gates that the write applies."""

    retrieved: Tensor  # (U,2,B,T,D)
    log_partition: Tensor  # (U,2,B,T)
    live: Tensor | None  # P^{i-1} (2,B,T,D); None for the first branch of the block
    beta: Tensor  # (2,B,T)
    rho: Tensor | None  # (B,T); None for the first branch of the block


class Dual(Retrieving):
    """DAR. `route` says which stream is scored and which is returned; the ablations differ in nothing else.

    h^j = Σ_r π_r^j v_r^j;   h = α⁰h⁰ + α¹h¹;   P^i = M(ρ) P^{i−1} + [β⁰u, β¹u]
    """

    def __init__(self, dim: int, place: Place, *, eps: float, gate_scale: float, rho_bias: float, route: Route = DUAL):
        if place.branches == 1:
            raise ValueError(
                "a DAR block of a single branch u (any, also the last block) has the state [β⁰u, β¹u], whose two "
                "streams are collinear and tell nothing of each other: use layers_per_block 1 or more, and a number "
                "that leaves no branch alone"
            )
        super().__init__(dim, place, eps=eps, route=route)
        transporting = place.transporting()
        self.gates = nn.ModuleList(
            GateSet(dim, transports=u in transporting, gate_scale=gate_scale, rho_bias=rho_bias, eps=eps)
            for u in sorted(set(place.sets))
        )

    def read(self, state: State, i: int) -> tuple[Tensor, Gated]:
        """h = α⁰h⁰ + α¹h¹ with α = σ(·), and for the write β = 2σ(·), both from Norm([h⁰; h¹]); ρ = σ(·) from P."""
        gates = cast(GateSet, self.gates[self.sets[i]])
        retrieved = self.retrieve(state, i)  # (2,B,T,D)
        alpha = torch.sigmoid(gates.alpha(retrieved))
        beta = 2 * torch.sigmoid(gates.beta(retrieved))
        rho = None if state.live is None else torch.sigmoid(cast(Gate, gates.rho)(state.live))[0]
        return ops.mix(alpha, retrieved), Gated(*state, beta, rho)

    def write(self, state: Gated, i: int, update: Tensor) -> State:
        """P¹ = [β⁰u, β¹u], then P^i = M(ρ) P^{i−1} + [β⁰u, β¹u]"""
        live = ops.gated_write(state.beta, update.to(state.retrieved.dtype))
        if state.live is not None:
            live = ops.transport(cast(Tensor, state.rho), state.live) + live
        return State(state.retrieved, state.log_partition, live)


class GateSet(nn.Module):
    """The gates of one parameter set; ρ only where a branch of the set finds a live state to transport."""

    def __init__(self, dim: int, *, transports: bool, gate_scale: float, rho_bias: float, eps: float):
        super().__init__()
        self.alpha = Gate(2, dim, 2, scale=gate_scale, bias=0.0, eps=eps)
        self.beta = Gate(2, dim, 2, scale=gate_scale, bias=0.0, eps=eps)
        self.rho = Gate(2, dim, 1, scale=gate_scale, bias=rho_bias, eps=eps) if transports else None
