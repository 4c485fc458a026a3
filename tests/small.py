"""Models and text that are small enough for tests."""

import pydoc_data.topics
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dualres.config.schema import ModelConfig, MoEConfig, ResidualConfig
from dualres.model.decoder import Decoder, build_decoder

# One of everything that configs/residual/ ships.
RESIDUALS = {
    "standard": ResidualConfig("standard"),
    "mhc-2": ResidualConfig("mhc", streams=2),
    "mhc-4": ResidualConfig("mhc", streams=4),
    "attnres-block": ResidualConfig("attnres-block", branches_per_block=4),
    "attnres-full": ResidualConfig("attnres-full"),
    "attnres-vproj": ResidualConfig("attnres-vproj"),
    "dar-block": ResidualConfig("dar-block", branches_per_block=4),
    "dar-full": ResidualConfig("dar-full"),
    "dar-selfkv": ResidualConfig("dar-selfkv"),
    "dar-fixedkv": ResidualConfig("dar-fixedkv"),
    "dar-crossv": ResidualConfig("dar-crossv"),
}
MOE = MoEConfig(experts=6, active=2, expert_width=24)
FEEDFORWARDS: dict[str, dict[str, Any]] = {"dense": {"ffn_width": 88}, "moe": {"moe": MOE}}


def model_config(feedforward: str = "dense", **changes: Any) -> ModelConfig:
    """Width 32, two heads per key-value head, five layers: no power of two divides the depth."""
    size: dict[str, Any] = {"layers": 5, "width": 32, "heads": 4, "kv_heads": 2, "vocab_size": 97, "context": 64}
    return ModelConfig(**{**size, **FEEDFORWARDS[feedforward], **changes})


def stirred(model: ModelConfig, residual: ResidualConfig, seed: int = 0, noise: float = 0.3) -> Decoder:
    """A decoder in which no parameter is zero, one or equal to another, so that every one of them matters.

    Much noise makes a rough function, whose depth magnifies rounding; float32 comparisons take 0.1.
    """
    decoder = build_decoder(model, residual, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return decoder


def random_tokens(batch: int = 3, length: int = 19, vocab_size: int = 97, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def real_text(batch: int, length: int, step: int) -> Tensor:
    """Bytes of the Python language reference, which every interpreter carries. -> (B,T)"""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    start = step * batch * length
    return (
        torch.frombuffer(bytearray(text[start : start + batch * length]), dtype=torch.uint8).long().view(batch, length)
    )


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    rows = logits[:, :-1].flatten(0, 1)
    return cross_entropy(rows.to(torch.promote_types(rows.dtype, torch.float32)), tokens[:, 1:].flatten())


def gradients(decoder: Decoder) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in decoder.named_parameters()}
    missing = [name for name, grad in found.items() if grad is None]
    assert not missing, f"parameters that no forward pass uses: {missing}"
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def relative_error(ours: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference over that of what is wanted."""
    ours, wanted = ours.detach().double(), wanted.detach().double()
    return float((ours - wanted).square().mean().sqrt() / wanted.square().mean().sqrt().clamp(min=1e-30))
