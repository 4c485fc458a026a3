"""Llama's family and our decoder: the same branches under other names. Configs and tensors, both ways."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from dualres.config.schema import ModelConfig, RopeScaling
from dualres.model.decoder import Decoder
from dualres.util.errors import ModelError

BRANCHES = (  # of a layer; ours: theirs
    {
        "norm.weight": "input_layernorm.weight",
        "module.query.weight": "self_attn.q_proj.weight",
        "module.query.bias": "self_attn.q_proj.bias",
        "module.key.weight": "self_attn.k_proj.weight",
        "module.key.bias": "self_attn.k_proj.bias",
        "module.value.weight": "self_attn.v_proj.weight",
        "module.value.bias": "self_attn.v_proj.bias",
        "module.output.weight": "self_attn.o_proj.weight",
        "module.output.bias": "self_attn.o_proj.bias",
        "module.query_norm.weight": "self_attn.q_norm.weight",
        "module.key_norm.weight": "self_attn.k_norm.weight",
    },
    {
        "norm.weight": "post_attention_layernorm.weight",
        "module.gate.weight": "mlp.gate_proj.weight",
        "module.up.weight": "mlp.up_proj.weight",
        "module.down.weight": "mlp.down_proj.weight",
    },
)
OUTSIDE = {
    "vocabulary.table.weight": "model.embed_tokens.weight",
    "vocabulary.output.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
}

ROPE_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}


class Architecture(NamedTuple):
    """One of the family: what its attention has."""

    attention_bias: Callable[[Any], str]  # of its config
    query_key_norm: bool


def _all_or_none(config: Any) -> str:
    return "all" if config.attention_bias else "none"


ARCHITECTURES = {
    "llama": Architecture(_all_or_none, False),
    "mistral": Architecture(lambda config: "none", False),
    "qwen2": Architecture(lambda config: "qkv", False),
    "qwen3": Architecture(_all_or_none, True),
}


def tensor_names(decoder: Decoder) -> dict[str, str]:
    """Ours to theirs, of every tensor that a model of the family has, whatever the residual pathway."""
    names = {ours: theirs for ours, theirs in OUTSIDE.items() if _has(decoder, ours)}
    branch = 0
    for b, block in enumerate(decoder.stack):
        for i, module in enumerate(block.branches):
            layer, kind = divmod(branch, 2)
            for suffix, _ in module.named_parameters():
                names[f"stack.blocks.{b}.branches.{i}.{suffix}"] = f"model.layers.{layer}.{BRANCHES[kind][suffix]}"
            branch += 1
    return names


def _has(decoder: Decoder, name: str) -> bool:
    return any(name == there for there, _ in decoder.named_parameters())


def their_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """The decoder's tensors under the family's names; only what the pathway adds is left out."""
    parameters = dict(decoder.named_parameters())
    return {theirs: parameters[ours].detach() for ours, theirs in tensor_names(decoder).items()}


def model_config(config: Any, where: str) -> ModelConfig:
    """Our config of a model of the family, given `transformers`' one. What does not fit is refused by name."""
    kind = config.model_type
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{where} is a {kind} model: dualres converts the architectures {known}")
    for name, fits in (
        ("hidden_act", config.hidden_act in ("silu", "swish")),
        ("mlp_bias", not getattr(config, "mlp_bias", False)),
        ("quantization_config", getattr(config, "quantization_config", None) is None),
    ):
        if not fits:
            raise ModelError(
                f"{where} has {name}={getattr(config, name)}, which our decoder does not: it cannot be converted"
            )
    rope: Mapping[str, Any] = config.rope_parameters
    needed = {"rope_theta", *ROPE_KEYS.get(rope.get("rope_type", "default"), ())}
    if lacking := sorted(needed - rope.keys()):
        raise ModelError(f"{where} has rotary positions {dict(rope)} without {lacking[0]}: restore its config.json")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{where} rotates a part of each head (partial_rotary_factor): it cannot be converted")
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    plain = head_width * config.num_attention_heads == config.hidden_size
    row = ARCHITECTURES[kind]
    return ModelConfig(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        ffn_width=config.intermediate_size,
        vocab_size=config.vocab_size,
        context=config.max_position_embeddings,
        tied_embeddings=config.tie_word_embeddings,
        rope_base=rope["rope_theta"],
        rope_scaling=_rope_scaling(rope, where),
        norm_eps=config.rms_norm_eps,
        init_std=config.initializer_range,
        head_size=None if plain else head_width,
        attention_bias=row.attention_bias(config),  # type: ignore[arg-type]
        query_key_norm=row.query_key_norm,
    )


def _rope_scaling(rope: Mapping[str, Any], where: str) -> RopeScaling | None:
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", rope["factor"])
    if kind == "llama3":
        edges = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
        return RopeScaling("llama3", rope["factor"], *edges)
    raise ModelError(f"{where} scales rotary positions by rope_type={kind}: dualres has linear and llama3")


def window_of_attention(config: Any) -> int | None:
    """How far back the source's attention looks, where that is not the whole context."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return window if kinds is None or "sliding_attention" in kinds else None


def their_config(model: ModelConfig, name: str, **tokens: Any) -> tuple[str, dict[str, Any]]:
    """The architecture of the family that computes what a `standard` model does, and the fields of its config."""
    fits: dict[tuple[str, bool], tuple[str, dict[str, Any]]] = {
        ("none", False): ("llama", {}),
        ("all", False): ("llama", {"attention_bias": True}),
        ("qkv", False): ("qwen2", {}),
        ("none", True): ("qwen3", {}),
        ("all", True): ("qwen3", {"attention_bias": True}),
    }
    found = fits.get((model.attention_bias, model.query_key_norm))
    for problem, wrong in (
        ("experts (model.moe)", model.moe is not None),
        ("a factorised vocabulary (model.embedding_width)", model.embedding_width not in (None, model.width)),
        (f"model.attention_bias={model.attention_bias} with model.query_key_norm", found is None),
        ("an eps of its own in each norm (model.read_eps)", model.read_eps is not None),
    ):
        if wrong:
            raise ModelError(
                f"{name} has {problem}, which no model of Llama's family has: export it as a dualres model"
            )
    assert found is not None
    kind, extra = found
    if kind == "llama" and model.width % model.heads:  # which LlamaConfig refuses, with any head_dim
        kind, extra = "mistral", {"sliding_window": None}
    return kind, {
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "intermediate_size": model.ffn_width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_width,
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied_embeddings,
        "rope_parameters": {"rope_theta": model.rope_base, **_their_scaling(model.rope_scaling)},
        **extra,
        **tokens,
    }


def _their_scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_context,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
    }
