"""The spec that puts the layers of a Megatron `GPTModel` on a residual pathway."""

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
from dualres.hub.megatron.layer import ResidualLayer, Step, output_alone
from dualres.residual import registry

NORMS = ("input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm", "kv_layernorm")
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {  # field of Megatron's config: supported values, remedy
    "pipeline_model_parallel_size": ((1,), "use 1: stages do not pass on the history"),
    "recompute_granularity": ((None, "selective"), "use 'selective' or None: full drops the history's gradient"),
    "cuda_graph_impl": (("none",), "use 'none'"),
    "mtp_num_layers": ((None, 0), "use None"),
    "fp32_residual_connection": ((False,), "use False: depth scores are float32 anyway"),
    "layernorm_zero_centered_gamma": ((False,), "use False: the decoder's norms multiply by their weights, not 1 more"),
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
    """A `transformer_layer_spec` for `GPTModel`: its layers on the residual pathway of your choice.

    `residual` is a method's name, such as "dar-block", or a `ResidualConfig` with its options. `layers` is the spec
    that you would use otherwise, of one layer or of each; by default TransformerEngine's, or Megatron's local one if
    TransformerEngine is not installed. The pathway's parameters are initialized as in `Decoder(…, seed)`.
    """
    refuse(config)
    method = ResidualConfig(residual) if isinstance(residual, str) else residual
    with torch.device("meta"):  # each model built from the spec has its own weights
        made = registry.build(config.hidden_size, 2 * config.num_layers, method, config.layernorm_epsilon)
    steps = [Step(b, i, i + 1 == p.branches) for b, p in enumerate(made.places) for i in range(p.branches)]
    plain = every_layer(config, default_layers(config) if layers is None else layers)
    specs = []
    for number, spec in enumerate(plain.layer_specs):
        own = steps[2 * number : 2 * number + 2]
        params = {
            "steps": own,
            "streams": made.streams,
            "pathways": {step.block: made.pathways[step.block] for step in own if step.branch == 0},
            "readout": made.readout if number + 1 == config.num_layers else None,
            "seed": seed,
        }
        submodules = dataclasses.replace(spec.submodules, self_attn_bda=output_alone, mlp_bda=output_alone)
        specs.append(ModuleSpec(ResidualLayer, {**spec.params, **params}, submodules))
    return TransformerBlockSubmodules(specs, plain.layer_norm)


def refuse(config: TransformerConfig) -> None:
    """Refuse Megatron settings with which a pathway would fail or compute something else."""
    for name, (right, remedy) in REFUSED.items():
        value = getattr(config, name)
        if value not in right:
            raise ConfigError(f"{name}={value!r} of Megatron's config is not supported by residual pathways: {remedy}")


def every_layer(config: TransformerConfig, spec: ModuleSpec | TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """A spec of each layer and the final norm, as `TransformerBlock` derives them from one layer's."""
    if isinstance(spec, ModuleSpec):
        norm = transformer_block.LayerNormImpl if gpt_layer_specs.HAVE_TE else RMSNorm
        spec = TransformerBlockSubmodules([spec] * config.num_layers, norm)
    found = spec.layer_specs or []
    if len(found) != config.num_layers:
        raise ConfigError(f"the spec has {len(found)} layers but num_layers={config.num_layers}: use one spec for each")
    foreign = [layer.module.__name__ for layer in found if layer.module is not TransformerLayer]
    if foreign:
        raise ConfigError(f"the spec has a {foreign[0]}: residual pathways support TransformerLayer only")
    if any(layer.submodules.cross_attention is not IdentityOp for layer in found):
        raise ConfigError("the spec has cross_attention, a third branch of a layer: leave it out")
    return spec


def default_layers(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's layers for this config."""
    if config.experimental_attention_variant is not None:
        raise ConfigError(
            f"experimental_attention_variant={config.experimental_attention_variant!r} of Megatron's config has its "
            "own spec: pass it as `layers`"
        )
    made = gpt_layer_specs.get_gpt_decoder_layer_specs(
        config, gpt_layer_specs.HAVE_TE, config.normalization, config.qk_l2_norm
    )
    if gpt_layer_specs.HAVE_TE:
        return TransformerBlockSubmodules(made, transformer_block.LayerNormImpl)
    layers = []
    for layer in made:
        attention = layer.submodules.self_attention
        attention = dataclasses.replace(attention, submodules=_with_our_norms(attention.submodules))
        submodules = dataclasses.replace(layer.submodules, self_attention=attention)
        layers.append(dataclasses.replace(layer, submodules=_with_our_norms(submodules)))
    return TransformerBlockSubmodules(layers, RMSNorm)


def _with_our_norms(submodules: Any) -> Any:
    others = (IdentityOp, gpt_layer_specs.L2Norm)
    found = [name for name in NORMS if getattr(submodules, name, IdentityOp) not in others]
    return dataclasses.replace(submodules, **dict.fromkeys(found, RMSNorm))


class RMSNorm(nn.RMSNorm):
    """For sequence parallelism without TransformerEngine, which Megatron's local norm refuses."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        if config.normalization != "RMSNorm":
            raise ConfigError(
                f"normalization={config.normalization!r} needs TransformerEngine: install it, or use 'RMSNorm'"
            )
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps, device=device, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
