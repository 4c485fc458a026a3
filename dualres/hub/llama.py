"""Llama's family and our decoder: the same branches under other names. Configs and tensors, both ways."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dualres.config.schema import ModelConfig, RopeScaling
from dualres.model.decoder import Decoder
from dualres.util.errors import ModelError

BRANCHES = (  # modules of a layer; ours: theirs
    {
        "norm": "input_layernorm",
        "module.query": "self_attn.q_proj",
        "module.key": "self_attn.k_proj",
        "module.value": "self_attn.v_proj",
        "module.output": "self_attn.o_proj",
        "module.query_norm": "self_attn.q_norm",
        "module.key_norm": "self_attn.k_norm",
    },
    {
        "norm": "post_attention_layernorm",
        "module.gate": "mlp.gate_proj",
        "module.up": "mlp.up_proj",
        "module.down": "mlp.down_proj",
    },
)
OUTSIDE = {
    "vocabulary.table.weight": "model.embed_tokens.weight",
    "vocabulary.output.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
}

FIELDS = {  # of a config; ours: theirs
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "ffn_width": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "context": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
    "tied_embeddings": "tie_word_embeddings",
}
LLAMA3_ROPE = {  # of a RopeScaling, beside its factor; ours: theirs
    "original_context": "original_max_position_embeddings",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
}
ROPE: dict[str, dict[str, str]] = {"linear": {}, "llama3": LLAMA3_ROPE}


# Attention of each architecture: its biases, by its config's `attention_bias` (None: it has no such field), and whether
# it normalizes queries and keys.
ARCHITECTURES: dict[str, tuple[dict[bool | None, str], bool]] = {
    "llama": ({False: "none", True: "all"}, False),
    "mistral": ({None: "none"}, False),
    "qwen2": ({None: "qkv"}, False),
    "qwen3": ({False: "none", True: "all"}, True),
}


def tensor_names(decoder: Decoder) -> dict[str, str]:
    """Ours to theirs, of every tensor that a model of the family has, whatever the residual pathway."""
    own = {name for name, _ in decoder.named_parameters()}
    names = {ours: theirs for ours, theirs in OUTSIDE.items() if ours in own}
    branch = 0
    for b, block in enumerate(decoder.stack):
        for i, module in enumerate(block.branches):
            layer, kind = divmod(branch, 2)
            for name, _ in module.named_parameters():
                part, _, tensor = name.rpartition(".")
                theirs = f"model.layers.{layer}.{BRANCHES[kind][part]}.{tensor}"
                names[f"stack.blocks.{b}.branches.{i}.{name}"] = theirs
            branch += 1
    return names


def their_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """The decoder's tensors under the family's names, without those of the residual pathway."""
    parameters = dict(decoder.named_parameters())
    return {theirs: parameters[ours].detach() for ours, theirs in tensor_names(decoder).items()}


def model_config(config: Any, where: str) -> ModelConfig:
    """Our config of a model of the family, given `transformers`' one. What does not fit is refused by name."""
    for name, fits in (
        ("hidden_act", config.hidden_act in ("silu", "swish")),
        ("mlp_bias", not getattr(config, "mlp_bias", False)),
        ("quantization_config", getattr(config, "quantization_config", None) is None),
    ):
        if not fits:
            raise ModelError(
                f"{where} has {name}={getattr(config, name)}, which our decoder does not have: it cannot be converted"
            )
    biases, query_key_norm = ARCHITECTURES[config.model_type]
    bias: Any = biases.get(getattr(config, "attention_bias", None), next(iter(biases.values())))
    rope: Mapping[str, Any] = config.rope_parameters
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelConfig(
        **{ours: getattr(config, theirs) for ours, theirs in FIELDS.items()},
        rope_scaling=_rope_scaling(rope, where),
        rope_base=rope["rope_theta"],
        head_size=None if head_width * config.num_attention_heads == config.hidden_size else head_width,
        attention_bias=bias,
        query_key_norm=query_key_norm,
    )


def _rope_scaling(rope: Mapping[str, Any], where: str) -> RopeScaling | None:
    kind = rope.get("rope_type", "default")
    needed = ["rope_theta", *(["factor", *ROPE[kind].values()] if kind in ROPE else [])]
    if missing := [key for key in needed if key not in rope]:
        raise ModelError(f"{where} has rotary positions {dict(rope)} without {missing[0]}: restore its config.json")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{where} rotates a part of each head (partial_rotary_factor): it cannot be converted")
    if kind == "default":
        return None
    if kind not in ROPE:
        raise ModelError(f"{where} scales rotary positions by rope_type={kind}: dualres has {' and '.join(ROPE)}")
    return RopeScaling(kind, rope["factor"], **{ours: rope[theirs] for ours, theirs in ROPE[kind].items()})


def window_of_attention(config: Any) -> int | None:
    """How far back the source's attention looks, where that is not the whole context."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return window if kinds is None or "sliding_attention" in kinds else None


def their_config(model: ModelConfig, name: str, **tokens: Any) -> tuple[str, dict[str, Any]]:
    """The architecture of the family that computes what a `standard` model does, and the fields of its config."""
    fitting: list[tuple[str, dict[str, Any]]] = [
        (kind, {} if flag is None else {"attention_bias": flag})
        for kind, (biases, norms) in ARCHITECTURES.items()
        for flag, bias in biases.items()
        if (bias, norms) == (model.attention_bias, model.query_key_norm)
    ]
    for problem, wrong in (
        ("experts (model.moe)", model.moe is not None),
        ("a factorized vocabulary (model.embedding_width)", model.embedding_width not in (None, model.width)),
        (f"model.attention_bias={model.attention_bias} with model.query_key_norm", not fitting),
        ("an eps of its own in each norm (model.read_eps)", model.read_eps is not None),
    ):
        if wrong:
            raise ModelError(
                f"{name} has {problem}, which no model of Llama's family has: export it as a dualres model"
            )
    kind, extra = fitting[0]
    if kind == "llama" and model.width % model.heads:  # which LlamaConfig refuses, with any head_dim
        kind, extra = "mistral", {"sliding_window": None}
    rope: dict[str, Any] = {"rope_theta": model.rope_base, "rope_type": "default"}
    if (scaling := model.rope_scaling) is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        rope |= {theirs: getattr(scaling, ours) for ours, theirs in ROPE[scaling.kind].items()}
    sizes = {theirs: getattr(model, ours) for ours, theirs in FIELDS.items()}
    return kind, {**sizes, "head_dim": model.head_width, "rope_parameters": rope, **extra, **tokens}
