"""Every operator of the residual pathways, written as its equation: the definition of correct.

Reductions over depth and width run in float32 (float64 for float64 streams), whatever the streams are stored in.
The history is a sequence of states and is never stacked; keys are never stored normalised, because
q·Norm(v) = (q·v)·rstd(v).
"""
# B batch  T tokens  D width  J stored streams  O output streams  R history  U query sets  G gate values  N mHC streams

from collections.abc import Sequence

import torch
from torch import Tensor

Route = tuple[Sequence[int], Sequence[int]]  # for each output stream: the stored stream scored, the one returned


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
    scored = [torch.einsum("ud,btd->ubt", wide(queries[:, j]), wide(state[k])) * norms[k] for j, k in enumerate(key)]
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


def prefix(history: Sequence[Tensor], queries: Tensor, route: Route, eps: float) -> tuple[Tensor, Tensor]:
    """Phase 1: the retrieved state h̃ of the history alone and its log-partition ζ = log Σ_r exp(a_r).

    history R × (J,B,T,D), queries (U,O,D) -> retrieved (U,O,B,T,D), log-partition (U,O,B,T)
    """
    logits = torch.stack([depth_logits(state, queries, route[0], eps) for state in history])  # (R,U,O,B,T)
    return _weighted_values(logits.softmax(0), history, route[1]), logits.logsumexp(0)


def merge(retrieved: Tensor, log_partition: Tensor, live: Tensor, queries: Tensor, route: Route, eps: float) -> Tensor:
    """Phase 2: λ = σ(ζ − a), h = λ h̃ + (1 − λ) v: adds the live state to the softmax of `prefix`, exactly.

    retrieved (U,O,B,T,D), log_partition (U,O,B,T), live (J,B,T,D), queries (U,O,D) -> (U,O,B,T,D)
    """
    history_mass = torch.sigmoid(log_partition - depth_logits(live, queries, route[0], eps)).unsqueeze(-1)
    values = wide(torch.stack([live[v] for v in route[1]]))
    return (history_mass * wide(retrieved) + (1 - history_mass) * values).to(live.dtype)


def gate_logits(streams: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, eps: float) -> Tensor:
    """scale · (x̄ W) + bias with x̄ = Norm([x⁰; x¹; …]), one weightless norm over all streams together.

    streams (J,B,T,D), weight (G,J,D), scale (1,), bias (G,) -> (G,B,T)
    """
    projected = torch.einsum("jbtd,gjd->gbt", wide(streams), wide(weight)) * inverse_rms(streams, (0, -1), eps)
    return wide(scale) * projected + wide(bias)[:, None, None]


def mix(weights: Tensor, streams: Tensor) -> Tensor:
    """Σ_j w^j x^j: the branch input from weighted streams. (J,B,T), (J,B,T,D) -> (B,T,D)"""
    return (weights.unsqueeze(-1) * wide(streams)).sum(0).to(streams.dtype)


def transport(rho: Tensor, live: Tensor) -> Tensor:
    """M(ρ) P with M = [[ρ, 1−ρ], [1−ρ, ρ]]: rows and columns sum to one. (B,T), (2,B,T,D) -> (2,B,T,D)"""
    rho = rho.unsqueeze(-1)
    return (rho * wide(live) + (1 - rho) * wide(live).flip(0)).to(live.dtype)


def gated_write(beta: Tensor, update: Tensor) -> Tensor:
    """[β⁰u, β¹u, …]: a branch output, written to every stream. (J,B,T), (B,T,D) -> (J,B,T,D)"""
    return (beta.unsqueeze(-1) * wide(update)).to(update.dtype)


def sinkhorn(logits: Tensor, steps: int) -> Tensor:
    """exp(logits), columns and then rows scaled to sum to one, `steps` times. (N,N,B,T) -> the same

    Rows come last and are exact, so streams that are equal stay equal. In log space: no entry can under- or overflow.
    """
    for _ in range(steps):
        logits = logits - logits.logsumexp(0, keepdim=True)
        logits = logits - logits.logsumexp(1, keepdim=True)
    return logits.exp()


def mix_streams(matrix: Tensor, streams: Tensor) -> Tensor:
    """M X: every stream becomes a weighted sum of all. (N,N,B,T), (N,B,T,D) -> (N,B,T,D)"""
    return torch.einsum("mnbt,nbtd->mbtd", matrix, wide(streams)).to(streams.dtype).contiguous()


def _weighted_values(weights: Tensor, candidates: Sequence[Tensor], value: Sequence[int]) -> Tensor:
    """Σ_r w_r^j v_r^j. weights (R,U,O,B,T), candidates R × (J,B,T,D) -> (U,O,B,T,D)"""
    outputs = []
    for j, v in enumerate(value):
        terms = [w[:, j].unsqueeze(-1) * wide(state[v]) for w, state in zip(weights, candidates, strict=True)]
        outputs.append(sum(terms[1:], start=terms[0]))
    return torch.stack(outputs, 1).to(candidates[0].dtype)
