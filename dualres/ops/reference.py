"""Every operator of the residual pathways, written as its equation: the definition of correct.

The live streams of a block are never stored: they are a weighted sum of the updates written so far,
P^j = Σ_k C_k^j u_k with token-wise coefficients C, so that M P + β u is the same sum with coefficients [M C, β].
The history is a sequence of states and is never stacked; keys are never stored normalized, because
q·Norm(v) = (q·v)·rstd(v). Reductions over depth and width run in float32 (float64 for float64 streams), for any
storage dtype. B,T stand for any token axes, (B,H,W) or none: every operator is token-wise.
"""
# B batch  T tokens  D width  J stored streams  O output streams  R history  U query sets  G gate values  K updates

from collections.abc import Sequence

import torch
from torch import Tensor

from dualres.ops.arguments import GateLike, Live, Norm, Prefix, Route


def to_accumulation_dtype(x: Tensor) -> Tensor:
    """`x` in the dtype that reductions run in: float32, or float64 when `x` is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def inverse_rms(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    """1 / √(mean x² + eps) over `dims`: the factor of a weightless RMSNorm."""
    return torch.rsqrt(to_accumulation_dtype(x).square().mean(dims) + eps)


def depth_logits(state: Tensor, queries: Tensor, key: Sequence[int], eps: float) -> Tensor:
    """a^j = q^j · Norm(k^j), with k^j the stored stream `key[j]`.

    state (J,B,T,D), queries (U,O,D) -> (U,O,B,T)
    """
    norms = inverse_rms(state, (-1,), eps)  # (J,B,T)
    queries, state = to_accumulation_dtype(queries), to_accumulation_dtype(state)
    scored = [torch.einsum("ud,...d->u...", queries[:, j], state[k]) * norms[k] for j, k in enumerate(key)]
    return torch.stack(scored, 1)


def depth_weights(candidates: Sequence[Tensor], queries: Tensor, route: Route, eps: float) -> Tensor:
    """π_r^j = exp(a_r^j) / Σ_u exp(a_u^j): the weight of each candidate in each output stream.

    candidates R × (J,B,T,D), queries (U,O,D) -> (R,U,O,B,T), summing to one over R
    """
    return torch.stack([depth_logits(state, queries, route.key, eps) for state in candidates]).softmax(0)


def prefix(history: Sequence[Tensor], queries: Tensor, *, route: Route, eps: float) -> tuple[Prefix, ...]:
    """Phase 1: the retrieved state h̃ of the history alone and its log-partition ζ = log Σ_r exp(a_r), per query set.

    history R × (J,B,T,D), queries (U,O,D) -> U × `Prefix`
    """
    logits = torch.stack([depth_logits(state, queries, route.key, eps) for state in history])  # (R,U,O,B,T)
    retrieved = _weighted_values(logits.softmax(0), history, route.value)  # (U,O,B,T,D)
    return tuple(map(Prefix, retrieved.unbind(0), logits.logsumexp(0).unbind(0)))


def combine(live: Live) -> Tensor:
    """P^j = Σ_k C_k^j u_k, the live streams. -> (J,B,T,D), in the accumulation dtype"""
    pairs = zip(live.updates, live.coefficients, strict=True)
    terms = [c.unsqueeze(-1) * to_accumulation_dtype(u) for u, c in pairs]
    return sum(terms[1:], start=terms[0])


def write(live: Live) -> Tensor:
    """The live streams as a state, in the dtype of the updates. -> (J,B,T,D)"""
    return combine(live).to(live.updates[0].dtype)


def merge(prefix: Prefix, streams: Tensor, query: Tensor, route: Route, eps: float) -> Tensor:
    """Phase 2: λ = σ(ζ − a), h = λ h̃ + (1 − λ) v: adds the live state to the softmax of `prefix`, exactly.

    live streams (J,B,T,D), query (O,D) -> (O,B,T,D), in the accumulation dtype
    """
    logits = depth_logits(streams, query.unsqueeze(0), route.key, eps)[0]
    history_mass = torch.sigmoid(prefix.log_partition - logits).unsqueeze(-1)
    values = to_accumulation_dtype(torch.stack([streams[v] for v in route.value]))
    return history_mass * to_accumulation_dtype(prefix.retrieved) + (1 - history_mass) * values


def read(
    prefix: Prefix, live: Live | None, *, query: Tensor | None, route: Route, eps: float, norm: Norm | None
) -> Tensor:
    """What a branch without gates reads: `merge` with the live state, if any, then the branch's norm.

    query (1,D) -> (B,T,D)
    """
    output_streams, _ = _output_streams(prefix, live, query, route, eps)
    return rms_norm(output_streams[0], norm).to(prefix.retrieved.dtype)


def gated_read(
    prefix: Prefix,
    live: Live | None,
    *,
    query: Tensor | None,
    gates: Sequence[GateLike],
    route: Route,
    eps: float,
    norm: Norm | None,
) -> tuple[Tensor, Live]:
    """What a branch of DAR reads, h = α⁰h⁰ + α¹h¹, and the live streams with the coefficients [M(ρ) C, β].

    α = σ(·) and β = 2σ(·) from Norm([h⁰; h¹]); ρ = σ(·) from Norm([P⁰; P¹]), if there is a live state.
    query (2,D), gates α, β and, with a live state, ρ
    -> (B,T,D), live streams with the next branch output still to be appended
    """
    output_streams, live_streams = _output_streams(prefix, live, query, route, eps)
    alpha = torch.sigmoid(gate_logits(output_streams, gates[0], eps))
    beta = 2 * torch.sigmoid(gate_logits(output_streams, gates[1], eps))
    next_coefficients = beta.unsqueeze(0)  # the column of this branch's output
    if live is not None and live_streams is not None:
        rho = torch.sigmoid(gate_logits(live_streams, gates[2], eps))[0]
        next_coefficients = torch.cat([transport(rho, live.coefficients), next_coefficients])
    h = rms_norm(mix(alpha, output_streams), norm)
    return h.to(prefix.retrieved.dtype), Live(live.updates if live else (), next_coefficients)


def hyper_read(
    live: Live, *, gates: Sequence[GateLike], steps: int, eps: float, norm: Norm | None
) -> tuple[Tensor, Live]:
    """What a branch of mHC reads, Σ_j H_pre^j X^j, and the live streams with the coefficients [H_res C, H_post].

    H_pre = σ(·), H_post = 2σ(·), H_res = Sinkhorn(·), the gates in this order, all from Norm([X⁰; X¹; …]).
    -> (B,T,D), live streams with the next branch output still to be appended
    """
    streams = combine(live)
    pre, post, mixing = (gate_logits(streams, gate, eps) for gate in gates)
    matrix = sinkhorn(mixing.view(len(streams), *streams.shape[:-1]), steps)  # (J,J,B,T)
    mixed = torch.einsum("ij...,kj...->ki...", matrix, live.coefficients)
    h = rms_norm(mix(torch.sigmoid(pre), streams), norm)
    next_coefficients = torch.cat([mixed, 2 * torch.sigmoid(post).unsqueeze(0)])
    return h.to(live.updates[0].dtype), Live(live.updates, next_coefficients)


def gate_logits(streams: Tensor, gate: GateLike, eps: float) -> Tensor:
    """scale · (x̄ W) + bias with x̄ = Norm([x⁰; x¹; …]), one weightless norm over all streams together.

    streams (J,B,T,D) -> (G,B,T)
    """
    weight, scale, bias = map(to_accumulation_dtype, (gate.weight, gate.scale, gate.bias))
    projected = torch.einsum("j...d,gjd->g...", to_accumulation_dtype(streams), weight)
    normalized = projected * inverse_rms(streams, (0, -1), eps)
    return scale * normalized + bias.view(-1, *[1] * (projected.ndim - 1))


def mix(weights: Tensor, streams: Tensor) -> Tensor:
    """Σ_j w^j x^j: the branch input from weighted streams. (J,B,T), (J,B,T,D) -> (B,T,D), in the accumulation dtype"""
    return (weights.unsqueeze(-1) * to_accumulation_dtype(streams)).sum(0)


def rms_norm(h: Tensor, norm: Norm | None) -> Tensor:
    """Norm(h) ⊙ w, or h itself if the read does not apply the branch's norm. (B,T,D) -> (B,T,D)"""
    if norm is None:
        return h
    return h * inverse_rms(h, (-1,), norm.eps).unsqueeze(-1) * to_accumulation_dtype(norm.weight)


def transport(rho: Tensor, coefficients: Tensor) -> Tensor:
    """M(ρ) C with M = [[ρ, 1−ρ], [1−ρ, ρ]]: rows and columns sum to one. (B,T), (K,2,B,T) -> (K,2,B,T)"""
    return rho * coefficients + (1 - rho) * coefficients.flip(1)


def sinkhorn(logits: Tensor, steps: int) -> Tensor:
    """exp(logits), columns and then rows scaled to sum to one, `steps` times. (J,J,B,T) -> the same

    Rows come last and are exact, so equal streams stay equal. In log space, so that no entry under- or overflows.
    """
    for _ in range(steps):
        logits = logits - logits.logsumexp(0, keepdim=True)
        logits = logits - logits.logsumexp(1, keepdim=True)
    return logits.exp()


def _output_streams(
    prefix: Prefix, live: Live | None, query: Tensor | None, route: Route, eps: float
) -> tuple[Tensor, Tensor | None]:
    """The output streams (O,B,T,D), and the live streams (J,B,T,D) if any, in the accumulation dtype."""
    if live is None:
        return to_accumulation_dtype(prefix.retrieved), None
    assert query is not None
    streams = combine(live)
    return merge(prefix, streams, query, route, eps), streams


def _weighted_values(weights: Tensor, candidates: Sequence[Tensor], value: Sequence[int]) -> Tensor:
    """Σ_r w_r^j v_r^j. weights (R,U,O,B,T), candidates R × (J,B,T,D) -> (U,O,B,T,D)"""
    outputs = []
    for j, v in enumerate(value):
        pairs = zip(weights, candidates, strict=True)
        terms = [w[:, j].unsqueeze(-1) * to_accumulation_dtype(state[v]) for w, state in pairs]
        outputs.append(sum(terms[1:], start=terms[0]))
    return torch.stack(outputs, 1).to(candidates[0].dtype)
