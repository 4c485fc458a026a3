"""Grouped-query attention with rotary positions, and the context that all branches of a forward pass share."""
# B batch  T tokens  P past and present tokens  D width  H head width

import math
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from dualres.config.schema import ModelConfig, RopeScaling

LONG = 64  # tokens from which on a cache makes room for more


class Cache(Protocol):
    """Keys and values of earlier tokens; `transformers`' `DynamicCache` implements it too."""

    def update(self, key: Tensor, value: Tensor, layer: int, /) -> tuple[Tensor, Tensor]:
        """Append the new tokens' keys and values and return all of them. (B,heads,T,H) -> (B,heads,P,H)"""
        ...

    def get_seq_length(self) -> int: ...


class KVCache:
    """Two buffers per attention layer; long ones have room for more tokens, so that a new one copies no earlier ones.

    Below `LONG` tokens, concatenation is faster. With gradients it is necessary: earlier tokens must stay unchanged.
    """

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values, each (B,heads,capacity,H)
        self.lengths: dict[int, int] = {}  # tokens in them

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """(B,heads,T,H) -> (B,heads,P,H)"""
        past = self.lengths.get(layer, 0)
        self.lengths[layer] = length = past + key.shape[2]
        if past > 0:
            keys, values = self.layers[layer]
            key, value = with_tokens(keys, past, key), with_tokens(values, past, value)
        self.layers[layer] = key, value
        full = key.shape[2] == length
        return (key, value) if full else (key.narrow(2, 0, length), value.narrow(2, 0, length))

    def get_seq_length(self) -> int:
        return next(iter(self.lengths.values()), 0)


def with_tokens(buffer: Tensor, past: int, new: Tensor) -> Tensor:
    """The buffer, or a larger one, with new tokens after its `past` ones. (B,heads,capacity,H), (B,heads,T,H)"""
    tokens, differentiated = new.shape[2], new.requires_grad or buffer.requires_grad
    if past + tokens <= buffer.shape[2] and not differentiated:
        buffer.narrow(2, past, tokens).copy_(new)
        return buffer
    parts = [buffer if buffer.shape[2] == past else buffer.narrow(2, 0, past), new]
    if past >= LONG and not differentiated:
        parts.append(buffer.narrow(2, 0, past // 2))  # room; its contents do not matter
    return torch.cat(parts, 2)


class RouterReport:
    """Collects the auxiliary loss of every MoE layer in one forward pass, by layer.

    A recomputed layer overwrites its own entry, so it counts once. `scale` multiplies the gradient that the auxiliary
    loss adds to each backward pass: use 1 / accumulation steps if the language-model loss is divided by that, times
    the loss scale, if any. With `attached=False` the losses stay out of the output's gradient and keep their
    graph, for a caller that adds them to a loss. Padding tokens are routed and counted like all others.
    """

    def __init__(self, scale: float = 1.0, attached: bool = True):
        self.scale, self.attached = scale, attached
        self.losses: dict[int, Tensor] = {}

    def mean(self) -> Tensor:
        """The auxiliary loss as in the paper's figure: the mean over layers, 1 if routing is uniform."""
        if not self.losses:
            raise ValueError("no MoE layer has reported: pass the report to a forward pass of a model with experts")
        return torch.stack(list(self.losses.values())).mean()


class Context:
    """The argument of every branch.

    Neither this nor the report is a dataclass or a pytree: FSDP2 would cast their contents, which rounds the rotary
    tables and gives the branches a copy of the report.
    """

    def __init__(
        self,
        cosine: Tensor,
        sine: Tensor,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        report: RouterReport | None = None,
    ):
        self.cosine = cosine  # (B or 1,1,T,H)
        self.sine = sine  # (B or 1,1,T,H), negative in the first half: see `rotary_tables`
        self.mask = mask  # (B or 1,1,T,P), True where a token may attend; None: causal, nothing cached unless T is 1
        self.cache = cache
        self.report = report


class Attention(nn.Module):
    """Softmax attention in which `heads // kv_heads` query heads share a key and value head.

    Biases and per-head norms of queries and keys are for checkpoints that were trained with them.
    """

    def __init__(self, model: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.head_width = layer, model.head_width
        queries, keys = model.heads * model.head_width, model.kv_heads * model.head_width
        biased = model.attention_bias != "none"
        self.query = nn.Linear(model.width, queries, bias=biased)
        self.key = nn.Linear(model.width, keys, bias=biased)
        self.value = nn.Linear(model.width, keys, bias=biased)
        self.output = nn.Linear(queries, model.width, bias=model.attention_bias == "all")
        self.query_norm = nn.RMSNorm(self.head_width, model.norm_eps) if model.query_key_norm else None
        self.key_norm = nn.RMSNorm(self.head_width, model.norm_eps) if model.query_key_norm else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(B,T,D) -> (B,T,D)"""
        shape = *x.shape[:2], -1, self.head_width
        query, key, value = (part(x).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, context), rotate(key, context)
        if context.cache is not None:
            key, value = context.cache.update(key, value, self.layer)
        mask = context.mask
        causal = mask is None
        if query.shape[2] == 1:  # an `if` statement, so that `causal` stays a constant when compiled for any length
            causal = False  # a single token attends to everything cached
        mixed = scaled_dot_product_attention(query, key, value, mask, is_causal=causal, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


def rotate(x: Tensor, context: Context) -> Tensor:
    """Rotary positions: the two halves of a head are the two coordinates of H/2 rotated planes. (B,heads,T,H)"""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(swapped * context.sine, x, context.cosine).to(x.dtype)


def rotary_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and ∓sine of every position and frequency. (B or 1,T), (H/2) -> two of (B or 1,1,T,H)

    The sine is negative in the first half, where it multiplies the second coordinate.
    """
    angles = positions[:, None, :, None] * torch.cat([-frequencies, frequencies])
    return angles.cos(), angles.sin()


def rotary_frequencies(
    head_width: int, base: float, scaling: RopeScaling | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """base^(−2i/H) of the H/2 planes of a head, scaled for a longer context by `scaling`. -> (H/2)"""
    exponents = torch.arange(0, head_width, 2, dtype=dtype, device=device) / head_width
    frequencies = 1.0 / base**exponents
    if scaling is None:
        return frequencies
    slowed = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slowed
    low, high = cast(float, scaling.low), cast(float, scaling.high)  # checked by RopeScaling
    waves_in_context = cast(int, scaling.original_context) * frequencies / (2 * math.pi)
    kept = ((waves_in_context - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * slowed + kept * frequencies


def token_positions(length: int, past: int, attention_mask: Tensor | None, device: torch.device) -> Tensor:
    """Positions of `length` new tokens after `past` cached ones, from the first unmasked token. -> (B or 1,T)"""
    if attention_mask is None:
        return torch.arange(past, past + length, device=device)[None]
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past : past + length]


def causal_mask(
    tokens: int, past: int, attention_mask: Tensor | None, documents: Tensor | None, device: torch.device
) -> Tensor | None:
    """Boolean attention mask of `tokens` new tokens after `past` cached ones. -> (B or 1,1,T,P), None if just causal

    `attention_mask` (B,P) is False at padding; `documents` (B,P) numbers each token's document, and tokens attend
    within their own. Every token attends to itself, so no softmax row is empty.
    """
    if attention_mask is None and documents is None and (past == 0 or tokens == 1):
        return None
    query = torch.arange(past, past + tokens, device=device)[:, None]
    key = torch.arange(past + tokens, device=device)[None, :]
    mask = (key <= query)[None, None]  # (1,1,T,P)
    if attention_mask is not None:
        mask = mask & (attention_mask[:, None, None, :] | (key == query))
    if documents is not None:
        mask = mask & (documents[:, None, past:, None] == documents[:, None, None, :])
    return mask
