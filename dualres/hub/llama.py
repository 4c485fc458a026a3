"""Maps configs and tensors between the Llama family and our decoder, whose branches compute the same."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dualres.config.schema import ModelConfig, RopeScaling
from dualres.model.decoder import Decoder
from dualres.util.errors import ModelError

BRANCHES = (  # modules of a layer, ours -> theirs
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

FIELDS = {  # of the config, ours -> theirs
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
LLAMA3_ROPE = {  # of a RopeScaling besides its factor, ours -> theirs
    "original_context": "original_max_position_embeddings",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
}
ROPE: dict[str, dict[str, str]] = {"linear": {}, "llama3": LLAMA3_ROPE}


# Attention of each architecture: its biases by the `attention_bias` of its config (None: it has no such field), and
# whether it normalizes queries and keys.
ARCHITECTURES: dict[str, tuple[dict[bool | None, str], bool]] = {
    "llama": ({False: "none", True: "all"}, False),
    "mistral": ({None: "none"}, False),
    "qwen2": ({None: "qkv"}, False),
    "qwen3": ({False: "none", True: "all"}, True),
}


def tensor_names(decoder: Decoder) -> dict[str, str]:
    """Our name -> their name for every tensor that the family has, with any residual pathway."""
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
    """The decoder's tensors by the family's names, without those of the residual pathway."""
    parameters = dict(decoder.named_parameters())
    return {theirs: parameters[ours].detach() for ours, theirs in tensor_names(decoder).items()}


def model_config(config: Any, where: str) -> ModelConfig:
    """Convert the config of a Llama-family model to ours. Raises an error that names an unsupported feature."""
    for name, is_supported in (
        ("hidden_act", config.hidden_act in ("silu", "swish")),
        ("mlp_bias", not getattr(config, "mlp_bias", False)),
        ("quantization_config", getattr(config, "quantization_config", None) is None),
    ):
        if not is_supported:
            raise ModelError(
                f"{where} has {name}={getattr(config, name)}, which dualres does not support: it cannot be converted"
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
        raise ModelError(f"{where} has rope_parameters {dict(rope)} without {missing[0]}: restore its config.json")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{where} has a partial_rotary_factor, which dualres does not support: it cannot be converted")
    if kind == "default":
        return None
    if kind not in ROPE:
        raise ModelError(f"{where} has rope_type={kind}: dualres supports {' and '.join(ROPE)}")
    return RopeScaling(kind, rope["factor"], **{ours: rope[theirs] for ours, theirs in ROPE[kind].items()})


def attention_window(config: Any) -> int | None:
    """The sliding window of attention in tokens; None if attention covers the whole context."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return window if kinds is None or "sliding_attention" in kinds else None


def their_config(model: ModelConfig, name: str, **tokens: Any) -> tuple[str, dict[str, Any]]:
    """The Llama-family architecture that is equivalent to a `standard` model, and the fields of its config."""
    matching: list[tuple[str, dict[str, Any]]] = [
        (kind, {} if flag is None else {"attention_bias": flag})
        for kind, (biases, norms) in ARCHITECTURES.items()
        for flag, bias in biases.items()
        if (bias, norms) == (model.attention_bias, model.query_key_norm)
    ]
    for problem, is_present in (
        ("experts (model.moe)", model.moe is not None),
        ("a factorized vocabulary (model.embedding_width)", model.embedding_width not in (None, model.width)),
        (f"model.attention_bias={model.attention_bias} with model.query_key_norm", not matching),
        ("an eps per norm (model.read_eps)", model.read_eps is not None),
    ):
        if is_present:
            raise ModelError(
                f"{name} has {problem}, which no Llama-family model supports: export it as a dualres model"
            )
    kind, extra = matching[0]
    if kind == "llama" and model.width % model.heads:  # LlamaConfig rejects it, with any head_dim
        kind, extra = "mistral", {"sliding_window": None}
    rope: dict[str, Any] = {"rope_theta": model.rope_base, "rope_type": "default"}
    if (scaling := model.rope_scaling) is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        rope |= {theirs: getattr(scaling, ours) for ours, theirs in ROPE[scaling.kind].items()}
    sizes = {theirs: getattr(model, ours) for ours, theirs in FIELDS.items()}
    return kind, {**sizes, "head_dim": model.head_width, "rope_parameters": rope, **extra, **tokens}
