"""What all branches of one forward pass share: positions, mask, cache, and where the router reports."""
# B batch  T tokens  P past and present tokens  H head width

import math
from typing import Protocol, cast

import torch
from torch import Tensor

from dualres.config.schema import ModelConfig


class Cache(Protocol):
    """Keys and values of earlier tokens; `transformers`' `DynamicCache` has this form too."""

    def update(self, key: Tensor, value: Tensor, layer: int, /) -> tuple[Tensor, Tensor]:
        """Append those of the new tokens and return all. (B,heads,T,H) -> (B,heads,P,H)"""
        ...

    def get_seq_length(self) -> int:
        """How many tokens are held."""
        ...


class KVCache:
    """The plain cache: one pair of tensors per attention layer, grown by concatenation."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """(B,heads,T,H) -> (B,heads,P,H)"""
        if layer in self.layers:
            past_key, past_value = self.layers[layer]
            key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
        self.layers[layer] = key, value
        return key, value

    def get_seq_length(self) -> int:
        """How many tokens are held."""
        return next(iter(self.layers.values()))[0].shape[2] if self.layers else 0


class RouterReport:
    """Collects the auxiliary loss of every MoE layer of one forward pass, by layer.

    A layer that is recomputed overwrites its own entry, so it counts once. `scale` multiplies the gradient that the
    auxiliary loss adds to every backward pass through the output: 1 / accumulation steps where the language-model loss
    is divided by that, and the scaler's factor where one is used. Where the losses are not `attached` to the output,
    they keep their graph, for a caller who adds them to a loss. Padding tokens are routed and counted like others.
    """

    def __init__(self, scale: float = 1.0, attached: bool = True):
        self.scale, self.attached = scale, attached
        self.losses: dict[int, Tensor] = {}

    def mean(self) -> Tensor:
        """The auxiliary loss as the paper's figure shows it: the mean over layers, 1 where routing is uniform."""
        if not self.losses:
            raise ValueError("no MoE layer has reported: pass the report to a forward pass of a model with experts")
        return torch.stack(list(self.losses.values())).mean()


class Context:
    """Given to every branch. Neither this nor the report is a dataclass or a pytree: FSDP2 would take them apart to
    cast what is inside, round the rotary tables, and hand the branches a copy of the report.
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
        self.sine = sine  # (B or 1,1,T,H)
        self.mask = mask  # (B or 1,1,T,P), True where a token may look; None: causal, nothing cached unless T is 1
        self.cache = cache
        self.report = report


def rotary_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and frequency. (B or 1,T), (H/2) -> two of (B or 1,1,T,H)"""
    angles = positions[:, None, :, None].to(frequencies.dtype) * frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotary_frequencies(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    """base^(−2i/H) of the H/2 planes of a head, scaled for a longer context where the model says so. -> (H/2)"""
    exponents = torch.arange(0, model.head_width, 2, dtype=dtype, device=device) / model.head_width
    frequencies = 1.0 / model.rope_base**exponents
    scaling = model.rope_scaling
    if scaling is None:
        return frequencies
    slowed = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slowed
    low, high = cast(float, scaling.low), cast(float, scaling.high)  # RopeScaling has checked
    waves_in_context = cast(int, scaling.original_context) * frequencies / (2 * math.pi)
    kept = ((waves_in_context - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * slowed + kept * frequencies


def causal_mask(
    tokens: int, past: int, attention_mask: Tensor | None, documents: Tensor | None, device: torch.device
) -> Tensor | None:
    """Boolean attention mask of `tokens` new tokens after `past` cached ones. -> (B or 1,1,T,P), None if plainly causal

    `attention_mask` (B,P) is False at padding; `documents` (B,P) numbers each token's document, and tokens attend
    within their own. Every token attends to itself, so no softmax row is empty.
    """
    if past == 0 and attention_mask is None and documents is None:
        return None
    query = torch.arange(past, past + tokens, device=device)[:, None]
    key = torch.arange(past + tokens, device=device)[None, :]
    mask = (key <= query)[None, None]  # (1,1,T,P)
    if attention_mask is not None:
        mask = mask & (attention_mask[:, None, None, :] | (key == query))
    if documents is not None:
        mask = mask & (documents[:, None, past:, None] == documents[:, None, None, :])
    return mask
