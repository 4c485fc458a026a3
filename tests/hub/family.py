"""Small models of Llama's family with random weights, made by `transformers`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

SIZE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-multi-head-large-eps": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 0.05}),
    "llama-multi-query-2-layers": ("Llama", {"num_key_value_heads": 1, "num_hidden_layers": 2}),
    "llama-biases": ("Llama", {"attention_bias": True}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-wide-heads": ("Mistral", {"sliding_window": None, "head_dim": 14, "num_attention_heads": 6}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rms_norm_eps": 1e-2}),  # of the norms of queries and keys, too
    "qwen3-biases-tied": ("Qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
}


def some_first(rows: Iterable[str], *fast: str) -> list[Any]:
    """Rows of a test; all but those that are named are in the slow tier."""
    assert set(fast) <= set(rows), fast
    return [pytest.param(row, marks=() if row in fast else pytest.mark.slow) for row in rows]


def family_model(name: str, seed: int = 0) -> Any:
    """Weights that all matter: no bias zero, no norm one, logits of some size."""
    kind, changes = FAMILY[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZE, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 else 0.15 * noise)
    return model


def saved_family_model(name: str, folder: Path, seed: int = 0) -> Path:
    """One of them as a folder."""
    family_model(name, seed).save_pretrained(folder)
    return folder
