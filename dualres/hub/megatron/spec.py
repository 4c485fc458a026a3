"""The layer spec that gives a Megatron `GPTModel` a residual pathway."""

import dataclasses
from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import transformer_block
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from dualres.config.schema import ConfigError, ResidualConfig
from dualres.hub.megatron.layer import ResidualLayer, Step, bias_dropout
from dualres.residual import registry

NORMS = ("input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm", "kv_layernorm")
SUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {  # field of Megatron's config -> supported values, remedy
    "pipeline_model_parallel_size": ((1,), "use 1: pipeline stages do not pass on the history"),
    "recompute_granularity": ((None, "selective"), "use 'selective' or None: 'full' drops the history's gradient"),
    "cuda_graph_impl": (("none",), "use 'none'"),
    "mtp_num_layers": ((None, 0), "use None"),
    "fp32_residual_connection": ((False,), "use False: depth scores are float32 anyway"),
    "layernorm_zero_centered_gamma": ((False,), "use False: the decoder's norms multiply by weight, not by 1 + weight"),
    "cpu_offloading": ((False,), "use False"),
    "fine_grained_activation_offloading": ((False,), "use False: it frees the input of a branch"),
    "heterogeneous_block_specs": ((False,), "use False"),
    "overlap_moe_expert_parallel_comm": ((False,), "use False"),
    "inference_fuse_tp_communication": ((False,), "use False"),
}


def layer_spec(
    config: TransformerConfig,
    residual: ResidualConfig | str,
    layers: ModuleSpec | TransformerBlockSubmodules | None = None,
    seed: int = 42,
) -> TransformerBlockSubmodules:
    """A `transformer_layer_spec` for `GPTModel` with a residual pathway of your choice.

    `residual` is a method's name, such as "dar-block", or a `ResidualConfig` with its options. `layers` is the spec
    that you would otherwise use, for one layer or for each; by default TransformerEngine's, or Megatron's local one if
    TransformerEngine is not installed. The pathway's parameters are initialized as in `Decoder(…, seed)`.
    """
    check_supported(config)
    method = ResidualConfig(residual) if isinstance(residual, str) else residual
    with torch.device("meta"):  # each model built from the spec has its own weights
        parts = registry.build(config.hidden_size, 2 * config.num_layers, method, config.layernorm_epsilon)
    steps = [Step(b, i, i + 1 == p.branches) for b, p in enumerate(parts.places) for i in range(p.branches)]
    plain = per_layer(config, default_layers(config) if layers is None else layers)
    specs = []
    for number, spec in enumerate(plain.layer_specs):
        own = steps[2 * number : 2 * number + 2]
        params = {
            "steps": own,
            "streams": parts.streams,
            "pathways": {step.block: parts.pathways[step.block] for step in own if step.branch == 0},
            "readout": parts.readout if number + 1 == config.num_layers else None,
            "seed": seed,
        }
        submodules = dataclasses.replace(spec.submodules, self_attn_bda=bias_dropout, mlp_bda=bias_dropout)
        specs.append(ModuleSpec(ResidualLayer, {**spec.params, **params}, submodules))
    return TransformerBlockSubmodules(specs, plain.layer_norm)


def check_supported(config: TransformerConfig) -> None:
    """Raise for Megatron settings with which a pathway would fail or compute something else."""
    for name, (supported, remedy) in SUPPORTED.items():
        value = getattr(config, name)
        if value not in supported:
            raise ConfigError(f"{name}={value!r} of Megatron's config is not supported by residual pathways: {remedy}")


def per_layer(config: TransformerConfig, spec: ModuleSpec | TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """A spec per layer and the final norm, as `TransformerBlock` derives them from the spec of one layer."""
    if isinstance(spec, ModuleSpec):
        norm = transformer_block.LayerNormImpl if gpt_layer_specs.HAVE_TE else RMSNorm
        spec = TransformerBlockSubmodules([spec] * config.num_layers, norm)
    specs = spec.layer_specs or []
    if len(specs) != config.num_layers:
        raise ConfigError(f"the spec has {len(specs)} layers but num_layers={config.num_layers}: use one per layer")
    unsupported = [layer.module.__name__ for layer in specs if layer.module is not TransformerLayer]
    if unsupported:
        raise ConfigError(f"the spec has a {unsupported[0]}: residual pathways support only TransformerLayer")
    if any(layer.submodules.cross_attention is not IdentityOp for layer in specs):
        raise ConfigError("the spec has cross_attention, which residual pathways do not support: remove it")
    return spec


def default_layers(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's default layer specs for this config."""
    if config.experimental_attention_variant is not None:
        raise ConfigError(
            f"experimental_attention_variant={config.experimental_attention_variant!r} of Megatron's config has its "
            "own spec: pass it as `layers`"
        )
    specs = gpt_layer_specs.get_gpt_decoder_layer_specs(
        config, gpt_layer_specs.HAVE_TE, config.normalization, config.qk_l2_norm
    )
    if gpt_layer_specs.HAVE_TE:
        return TransformerBlockSubmodules(specs, transformer_block.LayerNormImpl)
    layers = []
    for layer in specs:
        attention = layer.submodules.self_attention
        attention = dataclasses.replace(attention, submodules=_with_our_norms(attention.submodules))
        submodules = dataclasses.replace(layer.submodules, self_attention=attention)
        layers.append(dataclasses.replace(layer, submodules=_with_our_norms(submodules)))
    return TransformerBlockSubmodules(layers, RMSNorm)


def _with_our_norms(submodules: Any) -> Any:
    kept = (IdentityOp, gpt_layer_specs.L2Norm)
    replaced = [name for name in NORMS if getattr(submodules, name, IdentityOp) not in kept]
    return dataclasses.replace(submodules, **dict.fromkeys(replaced, RMSNorm))


class RMSNorm(nn.RMSNorm):
    """RMSNorm that supports sequence parallelism without TransformerEngine; Megatron's local norm does not."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        if config.normalization != "RMSNorm":
            raise ConfigError(
                f"normalization={config.normalization!r} needs TransformerEngine: install it, or use 'RMSNorm'"
            )
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps, device=device, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
