"""`standard` on a sparse backbone is Mixtral: the same logits and the same gradient of every parameter."""

import dataclasses
from typing import Any

import pytest
from transformers import MixtralConfig, MixtralForCausalLM

from dualres.config.schema import ModelConfig, MoEConfig
from tests.model.test_llama import SHARED_NAMES, assert_same_model, their_settings, with_weights_of
from tests.small import MOE, model_config

LANGUAGE_ONLY = dataclasses.replace(MOE, aux_coefficient=0.0)
CONFIGS = {
    "2 of 6": model_config("moe", moe=LANGUAGE_ONLY),
    "untied": model_config("moe", moe=LANGUAGE_ONLY, tied_embeddings=False),
    "6 of 6": model_config("moe", moe=dataclasses.replace(LANGUAGE_ONLY, active=6)),
    "3 of 40, so some are idle": model_config("moe", moe=MoEConfig(40, 3, 8, aux_coefficient=0.0)),
    "rope base 1e6": model_config("moe", moe=LANGUAGE_ONLY, rope_base=1e6),
}
MIXTRAL_NAMES = {
    **SHARED_NAMES,
    "stack.blocks.{}.branches.1.module.router.weight": "model.layers.{}.mlp.gate.weight",
    "stack.blocks.{}.branches.1.module.gate_up": "model.layers.{}.mlp.experts.gate_up_proj",
    "stack.blocks.{}.branches.1.module.down": "model.layers.{}.mlp.experts.down_proj",
}


def mixtral(config: ModelConfig) -> MixtralForCausalLM:
    assert config.moe is not None
    sparse: dict[str, Any] = {
        "intermediate_size": config.moe.expert_width,
        "num_local_experts": config.moe.experts,
        "num_experts_per_tok": config.moe.active,
        "sliding_window": None,
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
        "experts_implementation": "eager",
    }
    return MixtralForCausalLM(MixtralConfig(**their_settings(config), **sparse))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients(name):
    theirs = mixtral(CONFIGS[name])
    ours, names = with_weights_of(theirs, CONFIGS[name], MIXTRAL_NAMES)
    assert_same_model(ours, theirs, names)
