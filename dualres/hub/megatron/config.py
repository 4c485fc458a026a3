"""Megatron options for a model config."""

from typing import Any

from megatron.core.optimizer import ParamKey
from megatron.core.utils import init_method_normal
from torch.nn.functional import silu

from dualres.config.schema import ConfigError, ModelConfig
from dualres.hub.megatron.layer import UNDECAYED


def transformer_options(model: ModelConfig) -> dict[str, Any]:
    """Arguments of `TransformerConfig` for layers that compute the same; add your own parallelism options."""
    for name, is_unsupported in (
        ("attention_bias", model.attention_bias == "all"),
        ("embedding_width", model.embedding_width not in (None, model.width)),
        ("rope_scaling", model.rope_scaling is not None),
        ("read_eps", model.read_eps is not None),
    ):
        if is_unsupported:
            raise ConfigError(
                f"model.{name}={getattr(model, name)} is not supported in a Megatron GPTModel: train the model "
                "with `dualres train`"
            )
    options: dict[str, Any] = {
        "num_layers": model.layers,
        "hidden_size": model.width,
        "num_attention_heads": model.heads,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_width,
        "ffn_hidden_size": model.ffn_width,
        "gated_linear_unit": True,
        "activation_func": silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_eps,
        "add_bias_linear": False,
        "add_qkv_bias": model.attention_bias == "qkv",
        "qk_layernorm": model.query_key_norm,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": model.init_std,
        "output_layer_init_method": init_method_normal(model.init_std),
        "hetereogenous_dist_checkpoint": True,  # sic; layers that start a block have more parameters
    }
    if model.moe is not None:
        options |= {
            "ffn_hidden_size": model.moe.expert_width,
            "num_moe_experts": model.moe.experts,
            "moe_ffn_hidden_size": model.moe.expert_width,
            "moe_router_topk": model.moe.active,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": model.moe.aux_coefficient,
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
        }
    return options


def gpt_options(model: ModelConfig) -> dict[str, Any]:
    """Arguments of `GPTModel` besides config and spec."""
    return {
        "vocab_size": model.vocab_size,
        "max_sequence_length": model.context,
        "position_embedding_type": "rope",
        "rotary_base": model.rope_base,
        "share_embeddings_and_output_weights": model.tied_embeddings,
    }


def decay_overrides() -> dict[Any, dict[str, float]]:
    """Additional `config_overrides` for `get_megatron_optimizer`: no weight decay on queries and gates."""
    return {ParamKey(attr=UNDECAYED): {"wd_mult": 0.0}}
