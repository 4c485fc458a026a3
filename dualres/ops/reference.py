"""Every operator of the residual pathways, written as its equation: the definition of correct.

The live streams of a block are never stored: they are a weighted sum of what was written since it opened,
P^j = Σ_k C_k^j u_k with token-wise coefficients C, so that M P + β u is the same sum with coefficients [M C, β].
The history is a sequence of states and is never stacked; keys are never stored normalised, because
q·Norm(v) = (q·v)·rstd(v). Reductions over depth and width run in float32 (float64 for float64 streams), whatever the
streams are stored in. B,T stand for any token axes, (B,H,W) or none: every operator is token-wise.
"""
# B batch  T tokens  D width  J stored streams  O output streams  R history  U query sets  G gate values  K updates

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Route = tuple[Sequence[int], Sequence[int]]  # for each output stream: the stored stream scored, the one returned


class GateParameters(NamedTuple):
    """One gate: scale · (x̄ W) + bias."""

    weight: Tensor  # (G,J,D)
    scale: Tensor  # (1,)
    bias: Tensor  # (G,)


class Norm(NamedTuple):
    """The RMSNorm of the branch that reads."""

    weight: Tensor  # (D,)
    eps: float


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype that reductions run in: float32, or float64 when `x` is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def inverse_rms(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    """1 / √(mean x² + eps) over `dims`: what a weightless RMSNorm multiplies by."""
    return torch.rsqrt(wide(x).square().mean(dims) + eps)


def depth_logits(state: Tensor, queries: Tensor, key: Sequence[int], eps: float) -> Tensor:
    """a^j = q^j · Norm(k^j), with k^j the stored stream `key[j]`.

    state (J,B,T,D), queries (U,O,D) -> (U,O,B,T)
    """
    norms = inverse_rms(state, (-1,), eps)  # (J,B,T)
    scored = [torch.einsum("ud,...d->u...", wide(queries[:, j]), wide(state[k])) * norms[k] for j, k in enumerate(key)]
    return torch.stack(scored, 1)


def depth_weights(candidates: Sequence[Tensor], queries: Tensor, route: Route, eps: float) -> Tensor:
    """π_r^j = exp(a_r^j) / Σ_u exp(a_u^j): how much each output stream reads of each candidate.

    candidates R × (J,B,T,D), queries (U,O,D) -> (R,U,O,B,T), summing to one over R
    """
    return torch.stack([depth_logits(state, queries, route[0], eps) for state in candidates]).softmax(0)


def retrieve(candidates: Sequence[Tensor], queries: Tensor, route: Route, eps: float) -> Tensor:
    """h^j = Σ_r π_r^j v_r^j, with v^j the stored stream `route.value[j]`: one softmax over all candidates.

    candidates R × (J,B,T,D), queries (U,O,D) -> (U,O,B,T,D)
    """
    return _weighted_values(depth_weights(candidates, queries, route, eps), candidates, route[1])


def prefix(
    history: Sequence[Tensor], queries: Tensor, route: Route, eps: float
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Phase 1: the retrieved state h̃ of the history alone and its log-partition ζ = log Σ_r exp(a_r), per query set.

    history R × (J,B,T,D), queries (U,O,D) -> retrieved U × (O,B,T,D), log-partition U × (O,B,T)
    """
    logits = torch.stack([depth_logits(state, queries, route[0], eps) for state in history])  # (R,U,O,B,T)
    return _weighted_values(logits.softmax(0), history, route[1]).unbind(0), logits.logsumexp(0).unbind(0)


def combine(updates: Sequence[Tensor], coefficients: Tensor) -> Tensor:
    """P^j = Σ_k C_k^j u_k, the live streams. updates K × (B,T,D), coefficients (K,J,B,T) -> (J,B,T,D), wide"""
    terms = [c.unsqueeze(-1) * wide(u) for u, c in zip(updates, coefficients, strict=True)]
    return sum(terms[1:], start=terms[0])


def write(updates: Sequence[Tensor], coefficients: Tensor) -> Tensor:
    """The live streams as a state, in the dtype of the updates. K × (B,T,D), (K,J,B,T) -> (J,B,T,D)"""
    return combine(updates, coefficients).to(updates[0].dtype)


def merge(retrieved: Tensor, log_partition: Tensor, live: Tensor, queries: Tensor, route: Route, eps: float) -> Tensor:
    """Phase 2: λ = σ(ζ − a), h = λ h̃ + (1 − λ) v: adds the live state to the softmax of `prefix`, exactly.

    retrieved (O,B,T,D), log_partition (O,B,T), live (J,B,T,D), queries (O,D) -> (O,B,T,D), wide
    """
    logits = depth_logits(live, queries.unsqueeze(0), route[0], eps)[0]
    history_mass = torch.sigmoid(log_partition - logits).unsqueeze(-1)
    values = wide(torch.stack([live[v] for v in route[1]]))
    return history_mass * wide(retrieved) + (1 - history_mass) * values


def read(
    retrieved: Tensor,
    log_partition: Tensor,
    updates: Sequence[Tensor],
    coefficients: Tensor | None,
    queries: Tensor | None,
    route: Route,
    eps: float,
    norm: Norm | None,
) -> Tensor:
    """What a branch without gates reads: `merge` with the live state where there is one, then the branch's norm.

    retrieved (1,B,T,D), log_partition (1,B,T), updates K × (B,T,D), coefficients (K,J,B,T), queries (1,D) -> (B,T,D)
    """
    streams = _streams(retrieved, log_partition, updates, coefficients, queries, route, eps)[0]
    return normed(streams[0], norm).to(retrieved.dtype)


def gated_read(
    retrieved: Tensor,
    log_partition: Tensor,
    updates: Sequence[Tensor],
    coefficients: Tensor | None,
    queries: Tensor | None,
    gates: Sequence[GateParameters],
    route: Route,
    eps: float,
    norm: Norm | None,
) -> tuple[Tensor, Tensor]:
    """What a branch of DAR reads, h = α⁰h⁰ + α¹h¹, and the coefficients [M(ρ) C, β] that its write leaves.

    α = σ(·) and β = 2σ(·) from Norm([h⁰; h¹]); ρ = σ(·) from Norm([P⁰; P¹]), where there is a live state.
    retrieved (2,B,T,D), log_partition (2,B,T), updates K × (B,T,D), coefficients (K,2,B,T), queries (2,D), gates α, β
    and with a live state ρ -> (B,T,D), (K+1,2,B,T)
    """
    streams, live = _streams(retrieved, log_partition, updates, coefficients, queries, route, eps)
    alpha = torch.sigmoid(gate_logits(streams, gates[0], eps))
    left = 2 * torch.sigmoid(gate_logits(streams, gates[1], eps)).unsqueeze(0)  # β, the column of this branch's output
    if live is not None:
        assert coefficients is not None
        rho = torch.sigmoid(gate_logits(live, gates[2], eps))[0]
        left = torch.cat([transport(rho, coefficients), left])
    return normed(mix(alpha, streams), norm).to(retrieved.dtype), left


def hyper_read(
    updates: Sequence[Tensor],
    coefficients: Tensor,
    gates: Sequence[GateParameters],
    steps: int,
    eps: float,
    norm: Norm | None,
) -> tuple[Tensor, Tensor]:
    """What a branch of mHC reads, Σ_j H_pre^j X^j, and the coefficients [H_res C, H_post] that its write leaves.

    H_pre = σ(·), H_post = 2σ(·), H_res = Sinkhorn(·), the gates in this order, all from Norm([X⁰; X¹; …]).
    updates K × (B,T,D), coefficients (K,J,B,T) -> (B,T,D), (K+1,J,B,T)
    """
    live = combine(updates, coefficients)
    pre, post, mixing = (gate_logits(live, gate, eps) for gate in gates)
    matrix = sinkhorn(mixing.view(len(live), *live.shape[:-1]), steps)  # (J,J,B,T)
    left = torch.einsum("ij...,kj...->ki...", matrix, coefficients)
    h = normed(mix(torch.sigmoid(pre), live), norm)
    return h.to(updates[0].dtype), torch.cat([left, 2 * torch.sigmoid(post).unsqueeze(0)])


def gate_logits(streams: Tensor, gate: GateParameters, eps: float) -> Tensor:
    """scale · (x̄ W) + bias with x̄ = Norm([x⁰; x¹; …]), one weightless norm over all streams together.

    streams (J,B,T,D) -> (G,B,T)
    """
    projected = torch.einsum("j...d,gjd->g...", wide(streams), wide(gate.weight)) * inverse_rms(streams, (0, -1), eps)
    return wide(gate.scale) * projected + wide(gate.bias).view(-1, *[1] * (projected.ndim - 1))


def mix(weights: Tensor, streams: Tensor) -> Tensor:
    """Σ_j w^j x^j: the branch input from weighted streams. (J,B,T), (J,B,T,D) -> (B,T,D), wide"""
    return (weights.unsqueeze(-1) * wide(streams)).sum(0)


def normed(h: Tensor, norm: Norm | None) -> Tensor:
    """Norm(h) ⊙ w, or h itself where the branch's norm is not the read's business. (B,T,D) -> (B,T,D)"""
    if norm is None:
        return h
    return h * inverse_rms(h, (-1,), norm.eps).unsqueeze(-1) * wide(norm.weight)


def transport(rho: Tensor, coefficients: Tensor) -> Tensor:
    """M(ρ) C with M = [[ρ, 1−ρ], [1−ρ, ρ]]: rows and columns sum to one. (B,T), (K,2,B,T) -> (K,2,B,T)"""
    return rho * coefficients + (1 - rho) * coefficients.flip(1)


def sinkhorn(logits: Tensor, steps: int) -> Tensor:
    """exp(logits), columns and then rows scaled to sum to one, `steps` times. (J,J,B,T) -> the same

    Rows come last and are exact, so streams that are equal stay equal. In log space: no entry can under- or overflow.
    """
    for _ in range(steps):
        logits = logits - logits.logsumexp(0, keepdim=True)
        logits = logits - logits.logsumexp(1, keepdim=True)
    return logits.exp()


def _streams(
    retrieved: Tensor,
    log_partition: Tensor,
    updates: Sequence[Tensor],
    coefficients: Tensor | None,
    queries: Tensor | None,
    route: Route,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """What each output stream reads (O,B,T,D), and the live streams (J,B,T,D) where there are any; both wide."""
    if not updates:
        return wide(retrieved), None
    assert coefficients is not None
    assert queries is not None
    live = combine(updates, coefficients)
    return merge(retrieved, log_partition, live, queries, route, eps), live


def _weighted_values(weights: Tensor, candidates: Sequence[Tensor], value: Sequence[int]) -> Tensor:
    """Σ_r w_r^j v_r^j. weights (R,U,O,B,T), candidates R × (J,B,T,D) -> (U,O,B,T,D)"""
    outputs = []
    for j, v in enumerate(value):
        terms = [w[:, j].unsqueeze(-1) * wide(state[v]) for w, state in zip(weights, candidates, strict=True)]
        outputs.append(sum(terms[1:], start=terms[0]))
    return torch.stack(outputs, 1).to(candidates[0].dtype)
