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
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {  # a field of Megatron's config: the values that work, and a remedy
    "pipeline_model_parallel_size": ((1,), "use 1: stages hand on no history"),
    "recompute_granularity": ((None, "selective"), "use 'selective' or None: full drops the gradient of the history"),
    "cuda_graph_impl": (("none",), "use 'none'"),
    "mtp_num_layers": ((None, 0), "use None"),
    "fp32_residual_connection": ((False,), "use False: depth scores are float32 anyway"),
    "layernorm_zero_centered_gamma": ((False,), "use False: our norms multiply by their weights, not by 1 more"),
    "cpu_offloading": ((False,), "use False"),
    "fine_grained_activation_offloading": ((False,), "use False: it frees what a branch has read"),
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
    """What `GPTModel` takes as `transformer_layer_spec`: its layers on the residual pathway of your choice.

    `residual` is a method's name, such as "dar-block", or a `ResidualConfig` with its options. `layers` is the spec
    that you would give a plain model, of one layer or of each; without it, TransformerEngine's, or Megatron's local
    one where TransformerEngine is not installed. The pathway's parameters start as in `Decoder(…, seed)`.
    """
    refuse(config)
    method = ResidualConfig(residual) if isinstance(residual, str) else residual
    with torch.device("meta"):  # shapes alone: each model that is built from the spec makes weights of its own
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
    """Settings of Megatron with which a pathway would compute something else, or nothing at all."""
    for name, (right, remedy) in REFUSED.items():
        value = getattr(config, name)
        if value not in right:
            raise ConfigError(f"{name}={value!r} of Megatron's config does not work with residual pathways: {remedy}")


def every_layer(config: TransformerConfig, spec: ModuleSpec | TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """A spec for each layer and for the final norm, as `TransformerBlock` makes them of one layer's."""
    if isinstance(spec, ModuleSpec):
        norm = transformer_block.LayerNormImpl if gpt_layer_specs.HAVE_TE else RMSNorm
        spec = TransformerBlockSubmodules([spec] * config.num_layers, norm)
    found = spec.layer_specs or []
    if len(found) != config.num_layers:
        raise ConfigError(
            f"the spec has {len(found)} layers and num_layers={config.num_layers}: give one spec for each"
        )
    foreign = [layer.module.__name__ for layer in found if layer.module is not TransformerLayer]
    if foreign:
        raise ConfigError(f"the spec has layers of {foreign[0]}: a pathway goes around those of TransformerLayer only")
    if any(layer.submodules.cross_attention is not IdentityOp for layer in found):
        raise ConfigError("the spec has cross_attention: leave it out, a layer has two branches here")
    return spec


def default_layers(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layers as Megatron makes them for this config."""
    if config.experimental_attention_variant is not None:
        raise ConfigError(
            f"experimental_attention_variant={config.experimental_attention_variant!r} of Megatron's config has a spec "
            "of its own: give it as `layers`"
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
    """For sequence parallelism without TransformerEngine: Megatron's local norm refuses it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        if config.normalization != "RMSNorm":
            raise ConfigError(
                f"normalization={config.normalization!r} needs TransformerEngine: install it, or use 'RMSNorm'"
            )
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps, device=device, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
