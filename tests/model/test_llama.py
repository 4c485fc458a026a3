"""`standard` on a dense backbone is Llama: the same logits and the same gradient of every parameter."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from dualres.config.schema import ModelConfig, ResidualConfig
from dualres.model.decoder import Decoder, build_decoder
from tests.small import gradients, model_config, next_token_loss, random_tokens, relative_error

TOLERANCE = 1e-5
CONFIGS = {
    "grouped-query": model_config(heads=4, kv_heads=2),
    "multi-head": model_config(heads=4, kv_heads=4),
    "multi-query": model_config(heads=4, kv_heads=1),
    "untied": model_config(tied_embeddings=False),
    "one layer": model_config(layers=1),
    "even layers": model_config(layers=4),
    "rope base 1e6": model_config(rope_base=1e6),
    "large eps": model_config(norm_eps=0.03),
}
SHARED_NAMES = {  # ours: theirs; {} is the layer
    "vocabulary.table.weight": "model.embed_tokens.weight",
    "stack.blocks.{}.branches.0.norm.weight": "model.layers.{}.input_layernorm.weight",
    "stack.blocks.{}.branches.0.module.query.weight": "model.layers.{}.self_attn.q_proj.weight",
    "stack.blocks.{}.branches.0.module.key.weight": "model.layers.{}.self_attn.k_proj.weight",
    "stack.blocks.{}.branches.0.module.value.weight": "model.layers.{}.self_attn.v_proj.weight",
    "stack.blocks.{}.branches.0.module.output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "stack.blocks.{}.branches.1.norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
}
LLAMA_NAMES = {
    **SHARED_NAMES,
    "stack.blocks.{}.branches.1.module.gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "stack.blocks.{}.branches.1.module.up.weight": "model.layers.{}.mlp.up_proj.weight",
    "stack.blocks.{}.branches.1.module.down.weight": "model.layers.{}.mlp.down_proj.weight",
}


def their_settings(config: ModelConfig) -> dict[str, Any]:
    """What Llama and Mixtral have in common, in the words of `transformers`."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "tie_word_embeddings": config.tied_embeddings,
        "attn_implementation": "eager",
    }


def llama(config: ModelConfig) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**their_settings(config), intermediate_size=config.ffn_width or 0))


def with_weights_of(theirs: nn.Module, config: ModelConfig, names: Mapping[str, str]) -> tuple[Decoder, dict[str, str]]:
    """Draw weights for `theirs`, give them to a decoder of ours, and say what each parameter is called there."""
    ours = build_decoder(config, ResidualConfig("standard"))
    output = {} if config.tied_embeddings else {"vocabulary.output.weight": "lm_head.weight"}
    full = {a.format(i): b.format(i) for a, b in {**names, **output}.items() for i in range(config.layers)}
    parameters = dict(theirs.named_parameters())
    assert set(full.values()) == set(parameters)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parameters.values():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if noise.ndim == 1 else 0.15 * noise)
    ours.load_state_dict({a: parameters[b] for a, b in full.items()})
    return ours, full


def assert_same_model(ours: Decoder, theirs: nn.Module, names: Mapping[str, str]) -> None:
    tokens = random_tokens()
    our_logits, their_logits = ours(tokens), theirs(tokens).logits
    assert their_logits.std() > 0.3
    assert relative_error(our_logits, their_logits) < TOLERANCE
    next_token_loss(our_logits, tokens).backward()
    next_token_loss(their_logits, tokens).backward()
    assert_same_gradients(ours, theirs, names)


def assert_same_gradients(ours: Decoder, theirs: nn.Module, names: Mapping[str, str]) -> None:
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    for name, grad in gradients(ours).items():
        their_grad = wanted[names[name]]
        assert their_grad is not None
        assert relative_error(grad, their_grad) < TOLERANCE, name


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients(name):
    theirs = llama(CONFIGS[name])
    ours, names = with_weights_of(theirs, CONFIGS[name], LLAMA_NAMES)
    assert_same_model(ours, theirs, names)


@pytest.mark.parametrize("lengths", [(19, 19, 19), (19, 7, 1), (2, 19, 18)], ids=str)
def test_left_padding(lengths):
    theirs = llama(CONFIGS["grouped-query"])
    ours, names = with_weights_of(theirs, CONFIGS["grouped-query"], LLAMA_NAMES)
    tokens = random_tokens(batch=3, length=19)
    real = torch.arange(19) >= 19 - torch.tensor(lengths)[:, None]
    positions = (torch.arange(19) - 19 + torch.tensor(lengths)[:, None]).clamp(min=0)
    our_logits = ours(tokens, attention_mask=real)
    their_logits = theirs(tokens, attention_mask=real.long(), position_ids=positions).logits
    assert relative_error(our_logits[real], their_logits[real]) < TOLERANCE
    _loss_of_real_tokens(our_logits, tokens, real).backward()
    _loss_of_real_tokens(their_logits, tokens, real).backward()
    assert_same_gradients(ours, theirs, names)


def _loss_of_real_tokens(logits: Tensor, tokens: Tensor, real: Tensor) -> Tensor:
    predicting = real[:, :-1]
    return cross_entropy(logits[:, :-1][predicting], tokens[:, 1:][predicting])
