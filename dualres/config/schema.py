"""Experiments as frozen dataclasses that validate themselves; docs/reference/configuration.md is generated from them.

The text under a field is its documentation. The options of a residual method are defined and documented in the same
way in the file of the method (dualres/residual/).
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

from dualres.config.validation import (
    Bounds,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Size,
    at_most,
    choices,
    convert_fields,
    divides,
    divisors,
    multiple_of_8,
)
from dualres.util.errors import ConfigError as ConfigError


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts that replace the feed-forward of every layer."""

    experts: Size
    """experts per layer, E"""
    active: Size
    """experts per token"""
    expert_width: Size
    """hidden width of one expert; a multiple of 8"""
    aux_coefficient: NonNegativeFloat = 0.01
    """weight of the load-balancing loss"""

    def __post_init__(self) -> None:
        convert_fields(self, "model.moe.")
        at_most("model.moe.active", self.active, "model.moe.experts", self.experts)
        multiple_of_8("model.moe.expert_width", self.expert_width)


@dataclass(frozen=True)
class RopeScaling:
    """Scaled rotary frequencies, for a longer context than the model was first trained with."""

    kind: Literal["linear", "llama3"]
    """`linear` divides all frequencies by the factor, `llama3` only those of long wavelengths"""
    factor: PositiveFloat
    """divisor of the frequencies"""
    original_context: PositiveInt | None = None
    """`llama3`, required: the context that the model was first trained with"""
    low: PositiveFloat | None = None
    """`llama3`, required: wavelengths above `original_context / low` are scaled fully"""
    high: PositiveFloat | None = None
    """`llama3`, required: wavelengths below `original_context / high` are not scaled; between the two, partly"""

    def __post_init__(self) -> None:
        convert_fields(self, "model.rope_scaling.")
        for name in ("original_context", "low", "high"):
            value = getattr(self, name)
            if (value is not None) != (self.kind == "llama3"):
                remedy = "set it" if value is None else "remove it"
                raise ConfigError(f"model.rope_scaling.{name}={value} does not go with kind={self.kind}: {remedy}")
        if self.kind == "llama3" and not cast(float, self.low) < cast(float, self.high):
            raise ConfigError(
                f"model.rope_scaling.low={self.low} is not below model.rope_scaling.high={self.high}: "
                "use low 1 and high 4"
            )


@dataclass(frozen=True)
class ModelConfig:
    """The decoder without its residual pathway."""

    layers: Size
    """Transformer layers, L; each has an attention and a feed-forward branch"""
    width: Size
    """width of a residual stream, d"""
    heads: Size
    """attention heads; unless `head_size` is set, `width / heads` must be an even integer"""
    kv_heads: Size
    """key-value heads, each shared by `heads / kv_heads` query heads"""
    ffn_width: Size | None = None
    """hidden width of the SwiGLU feed-forward; required for a dense model"""
    vocab_size: Size = 131_072
    """entries of the vocabulary"""
    context: Size = 4096
    """tokens per training sequence"""
    tied_embeddings: bool = True
    """use the embedding table for the output as well"""
    embedding_width: Size | None = None
    """width of a factorized embedding table; null: `width`"""
    rope_base: PositiveFloat = 10_000.0
    """base of the rotary frequencies"""
    norm_eps: PositiveFloat = 1e-6
    """eps of all norms, including those on depth keys and gate inputs"""
    init_std: PositiveFloat = 0.02
    """standard deviation of the initial weight matrices of branches and vocabulary"""
    moe: MoEConfig | None = None
    """routed experts in place of the feed-forward of every layer"""
    head_size: Size | None = None
    """width of an attention head; null: `width / heads`"""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """`qkv`: biases on queries, keys and values (Qwen2); `all`: also on the output projection"""
    query_key_norm: bool = False
    """normalize queries and keys per head, before the rotary embedding (Qwen3)"""
    rope_scaling: RopeScaling | None = None
    """scaled rotary frequencies, for a longer context"""
    read_eps: tuple[PositiveFloat, ...] | None = None
    """2L + 1 numbers: the eps of each branch's input norm and of the final norm; set in converted checkpoints"""

    def __post_init__(self) -> None:
        convert_fields(self, "model.")
        if self.head_size is not None:
            if self.head_size % 2:
                raise ConfigError(
                    f"model.head_size={self.head_size} is odd, and the rotary embedding rotates pairs: "
                    "use an even number"
                )
        elif self.width % (2 * self.heads):
            fitting = divisors(self.width // 2) if self.width % 2 == 0 else []
            remedy = f"use heads {choices(fitting)}" if fitting else "use an even width"
            raise ConfigError(
                f"model.width={self.width} does not split into model.heads={self.heads} heads of even width, which "
                f"the rotary embedding needs: {remedy}"
            )
        divides("model.kv_heads", self.kv_heads, {"model.heads": self.heads})
        if self.embedding_width is not None:
            remedy = f"at most {self.width}, or null for a table as wide as the model"
            at_most("model.embedding_width", self.embedding_width, "model.width", self.width, remedy)
        if self.read_eps is not None and len(self.read_eps) != 2 * self.layers + 1:
            raise ConfigError(
                f"model.read_eps has {len(self.read_eps)} values for the inputs of {2 * self.layers} branches and "
                f"of the output: use {2 * self.layers + 1}, or null for model.norm_eps everywhere"
            )
        if self.moe is None:
            if self.ffn_width is None:
                raise ConfigError(
                    "model.ffn_width is missing: set it for a dense model, or set model.moe for a sparse one"
                )
        else:
            if self.ffn_width is not None:
                raise ConfigError(
                    f"model.ffn_width={self.ffn_width} and model.moe are both set: remove ffn_width for a sparse "
                    "model (its experts have model.moe.expert_width), or moe for a dense one"
                )
            multiple_of_8("model.width", self.width)

    @property
    def head_width(self) -> int:
        return self.head_size or self.width // self.heads

    def eps_of_read(self, branch: int) -> float:
        """The eps of the input norm of branch 0 … 2L−1; 2L is the final norm."""
        return self.norm_eps if self.read_eps is None else self.read_eps[branch]


@dataclass(frozen=True, init=False)
class ResidualConfig:
    """The residual method. All other keys are options of the method; an option of a different method is an error."""

    method: str
    """name of the method"""
    branches_per_block: PositiveInt | None
    """branches per block, S; blocks of K layers have 2K. The last block is shorter if S does not divide 2L"""
    default_branches_per_block: PositiveInt | None
    """`branches_per_block` of methods that do not set their own; set by the scale"""
    options: tuple[tuple[str, Any], ...]

    def __init__(
        self,
        method: str,
        branches_per_block: int | None = None,
        default_branches_per_block: int | None = None,
        **options: Any,
    ) -> None:
        if isinstance(options.get("options"), tuple):  # from dataclasses.replace, which passes every field
            options = {**dict(options.pop("options")), **options}
        values = {name: _hashable(value, f"residual.{name}") for name, value in options.items() if value is not None}
        vars(self).update(
            method=method,
            branches_per_block=branches_per_block,
            default_branches_per_block=default_branches_per_block,
            options=tuple(sorted(values.items())),
        )
        convert_fields(self, "residual.")

    def to_dict(self) -> dict[str, Any]:
        """The keys that are set, as arguments of `ResidualConfig(**…)`."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "options"}
        return {**{name: value for name, value in fields.items() if value is not None}, **dict(self.options)}


def _hashable(value: Any, where: str) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_hashable(item, where) for item in value)
    try:
        hash(value)
    except TypeError:
        raise ConfigError(f"{where}={value!r} is not a single value: use a number, text, true or false") from None
    return value


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is distributed over processes."""

    tensor: PositiveInt = 1
    """ranks that split every matrix and every sequence"""
    pipeline: PositiveInt = 1
    """ranks that the blocks are distributed over"""
    virtual_stages: PositiveInt = 1
    """chunks of blocks per pipeline rank; above 1 the schedule is interleaved"""
    expert: PositiveInt = 1
    """data-parallel ranks that the experts are distributed over; must divide their number"""
    context: PositiveInt = 1
    """context-parallel ranks; not implemented, above 1 is an error"""
    sequence_parallel: bool = False
    """shard activations outside the branches along the sequence; required for `tensor` above 1"""
    zero_stage: Annotated[int, Bounds(minimum=0, maximum=3)] = 0
    """ZeRO stage of `engine: deepspeed`: shards optimizer state (1), gradients (2), parameters (3)"""

    def __post_init__(self) -> None:
        convert_fields(self, "train.parallel.")


@dataclass(frozen=True)
class TrainConfig:
    """The training recipe, which belongs to the scale. Tokens per step are `global_batch` × `model.context`.

    The paper's scales have the paper's settings. The paper does not state the learning rates, AdamW settings, weight
    decay and clipping of the 0.1B to 0.5B models (assumed: those of the 1B model), nor the decay and precision of the
    dense models (assumed: cosine and bf16).
    """

    dataset: str
    """name of the dataset that the recipe was made for; `--data` sets the data that is read"""
    tokens: PositiveInt
    """training tokens"""
    micro_batch: PositiveInt
    """sequences per forward pass and device"""
    global_batch: PositiveInt
    """sequences per optimizer step"""
    learning_rate: PositiveFloat
    """peak learning rate"""
    min_learning_rate: NonNegativeFloat
    """learning rate at the end of the cosine decay"""
    warmup_steps: NonNegativeInt
    """steps of linear warmup; unless you set it, at most a quarter of the steps (for runs shorter than the recipe's)"""
    weight_decay: NonNegativeFloat = 0.1
    """weight decay of matrices; norms, queries, gates, biases and scales have none"""
    betas: tuple[float, float] = (0.9, 0.95)
    """betas of AdamW"""
    adam_eps: PositiveFloat = 1e-8
    """eps of AdamW"""
    clip: PositiveFloat = 1.0
    """maximum gradient norm; larger gradients are clipped"""
    validation_tokens: PositiveInt = 10_000_000
    """tokens of the validation set to use"""
    seed: Annotated[int, Bounds(minimum=0, maximum=2**63 - 1)] = 42
    """seed of the weights and of the data order"""
    precision: Literal["bf16", "fp32"] = "bf16"
    """dtype of the computation"""
    compile: Literal["off", "default", "max-autotune"] = "off"
    """mode of `torch.compile`; `max-autotune` uses no CUDA graphs in a pipeline"""
    recompute: Literal["none", "selective", "full"] = "none"
    """activation checkpointing of a block: `selective` stores matrix products and attention, `full` only the inputs"""
    documents: Literal["attend", "isolate"] = "attend"
    """attention across the documents of a sequence: `attend` allows it (not stated by the paper), `isolate` does not"""
    loss_rows: PositiveInt = 1024
    """tokens whose logits are in memory at the same time"""
    engine: Literal["auto", "single", "ddp", "fsdp2", "deepspeed"] = "auto"
    """`auto`: `single` for one process, `fsdp2` for several"""
    validate_every: PositiveInt = 1000
    """steps between validations; the last step always validates"""
    checkpoint_every: PositiveInt = 1000
    """steps between checkpoints; also saved at the last step, at a stop and at the best validation loss"""
    keep_checkpoints: PositiveInt = 3
    """number of latest checkpoints to keep, in addition to the best"""
    untimed_steps: NonNegativeInt = 300
    """steps after a launch or resume that are excluded from the reported throughput"""
    timeout: PositiveFloat = 1800.0
    """seconds to wait for another process in a step, including the first; startup: 1800; a save: at least 1800"""
    peak_flops: PositiveFloat | None = None
    """peak FLOP/s of one device, for the utilization; null: measured with a matrix product"""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """for `engine: fsdp2`, except `zero_stage`; the other engines are data-parallel"""

    def __post_init__(self) -> None:
        convert_fields(self, "train.")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"train.betas={self.betas} are not all in [0, 1): use (0.9, 0.95)")
        divides("train.micro_batch", self.micro_batch, {"train.global_batch": self.global_batch})
        remedy = f"a tenth of it, {self.learning_rate / 10:g}"
        at_most("train.min_learning_rate", self.min_learning_rate, "train.learning_rate", self.learning_rate, remedy)


@dataclass(frozen=True)
class AnalyzeConfig:
    """Analyses during training."""

    every: PositiveInt | None = None
    """steps between measurements of stream norms, CKA, write gap and divergence, for metrics and TensorBoard"""

    def __post_init__(self) -> None:
        convert_fields(self, "analyze.")


@dataclass(frozen=True)
class Config:
    """One experiment: a scale (`model` and `train`) and a residual method."""

    model: ModelConfig
    residual: ResidualConfig
    train: TrainConfig
    analyze: AnalyzeConfig = field(default_factory=AnalyzeConfig)

    def __post_init__(self) -> None:
        convert_fields(self, "")
        model, train, parallel = self.model, self.train, self.train.parallel
        if train.tokens < self.tokens_per_step:
            raise ConfigError(
                f"train.tokens={train.tokens} is less than one step of train.global_batch={train.global_batch} × "
                f"model.context={model.context} tokens: use at least {self.tokens_per_step}"
            )
        if train.warmup_steps > self.steps:
            raise ConfigError(
                f"train.warmup_steps={train.warmup_steps} exceeds the {self.steps} steps that "
                f"train.tokens={train.tokens} allow: use fewer, such as a tenth of them"
            )
        heads = {"model.heads": model.heads, "model.kv_heads": model.kv_heads}
        divides("train.parallel.tensor", parallel.tensor, heads)
        if model.moe is not None:
            divides("train.parallel.expert", parallel.expert, {"model.moe.experts": model.moe.experts})
        elif parallel.expert > 1:
            raise ConfigError(f"train.parallel.expert={parallel.expert} needs experts: use 1, or set model.moe")
        at_most("train.parallel.pipeline", parallel.pipeline, "model.layers", model.layers)

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch * self.model.context

    @property
    def steps(self) -> int:
        """The steps in the token budget; a last, partial batch is dropped."""
        return self.train.tokens // self.tokens_per_step

    def to_dict(self) -> dict[str, Any]:
        """The sections with all their keys; `build(Config, …, "")` restores the same config from them."""
        return {**dataclasses.asdict(self), "residual": self.residual.to_dict()}
