"""Configs: what a model, its residual pathway and its training are, as frozen dataclasses that check themselves.

Every key is described in docs/configuration.md. dualres/config/loading.py reads them from YAML.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal, cast

from dualres.config.validation import (
    ConfigError,
    choices,
    divides,
    divisors,
    multiple_of_8,
    not_negative,
    positive,
    settle,
)

__all__ = [
    "Config",
    "ConfigError",
    "MoEConfig",
    "ModelConfig",
    "ParallelConfig",
    "ResidualConfig",
    "RopeScaling",
    "TrainConfig",
]

MOST_STREAMS = 64  # a token's mixing matrix is streams × streams
MOST_SINKHORN_STEPS = 1000


@dataclass(frozen=True)
class MoEConfig:
    """The routed experts that replace the feed-forward of every layer."""

    experts: int
    active: int
    expert_width: int
    aux_coefficient: float = 0.01

    def __post_init__(self) -> None:
        settle(self, "model.moe.")
        positive(self, "model.moe.", "experts", "active", "expert_width")
        if self.active > self.experts:
            raise ConfigError(
                f"model.moe.active={self.active} exceeds model.moe.experts={self.experts}: "
                f"use at most {self.experts} active experts"
            )
        not_negative(self, "model.moe.", "aux_coefficient")
        multiple_of_8("model.moe.expert_width", self.expert_width)


@dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies for a longer context than a model began with.

    linear: all frequencies divided by `factor`. llama3: those of waves longer than `original_context` / `low`, and not
    those of waves shorter than `original_context` / `high`; between the two it goes smoothly over.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    original_context: int | None = None
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        settle(self, "model.rope_scaling.")
        positive(self, "model.rope_scaling.", "factor")
        edges = ("original_context", "low", "high")
        for name in edges:
            value = getattr(self, name)
            if (value is not None) != (self.kind == "llama3"):
                remedy = "set it" if value is None else "remove it"
                raise ConfigError(f"model.rope_scaling.{name}={value} does not go with kind={self.kind}: {remedy}")
        if self.kind == "llama3":
            positive(self, "model.rope_scaling.", *edges)
            if not cast(float, self.low) < cast(float, self.high):
                raise ConfigError(
                    f"model.rope_scaling.low={self.low} is not below model.rope_scaling.high={self.high}: "
                    "use low 1 and high 4"
                )


@dataclass(frozen=True)
class ModelConfig:
    """The decoder without its residual pathway."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn_width: int | None = None
    vocab_size: int = 131_072
    context: int = 4096
    tied_embeddings: bool = True
    embedding_width: int | None = None
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
    init_std: float = 0.02
    moe: MoEConfig | None = None
    head_size: int | None = None
    attention_bias: Literal["none", "qkv", "all"] = "none"
    query_key_norm: bool = False
    rope_scaling: RopeScaling | None = None
    read_eps: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        settle(self, "model.")
        positive(self, "model.", "layers", "width", "heads", "kv_heads", "vocab_size", "context", "rope_base")
        positive(self, "model.", "norm_eps", "init_std")
        if self.head_size is not None:
            positive(self, "model.", "head_size")
            if self.head_size % 2:
                raise ConfigError(
                    f"model.head_size={self.head_size} is odd, and rotary positions turn pairs: use an even number"
                )
        elif self.width % (2 * self.heads):
            fitting = divisors(self.width // 2) if self.width % 2 == 0 else []
            remedy = f"use heads {choices(fitting)}" if fitting else "use an even width"
            raise ConfigError(
                f"model.width={self.width} does not split into model.heads={self.heads} heads of even width, which "
                f"rotary positions need: {remedy}"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model.heads={self.heads} is not divisible by model.kv_heads={self.kv_heads}: "
                f"use kv_heads {choices(divisors(self.heads))}"
            )
        if self.embedding_width is not None:
            positive(self, "model.", "embedding_width")
            if self.embedding_width > self.width:
                raise ConfigError(
                    f"model.embedding_width={self.embedding_width} exceeds model.width={self.width}: use at most "
                    f"{self.width}, or null for a table as wide as the model"
                )
        if self.read_eps is not None:
            if len(self.read_eps) != 2 * self.layers + 1:
                raise ConfigError(
                    f"model.read_eps has {len(self.read_eps)} values for the inputs of {2 * self.layers} branches and "
                    f"of the output: give {2 * self.layers + 1}, or null for model.norm_eps everywhere"
                )
            if min(self.read_eps) <= 0:
                raise ConfigError(f"model.read_eps has {min(self.read_eps)}: use numbers above 0")
        if self.moe is None:
            if self.ffn_width is None:
                raise ConfigError(
                    "model.ffn_width is missing: set it for a dense model, or set model.moe for a sparse one"
                )
            positive(self, "model.", "ffn_width")
        else:
            if self.ffn_width is not None:
                raise ConfigError(
                    f"model.ffn_width={self.ffn_width} and model.moe are both set: remove ffn_width for a sparse "
                    "model (its experts have model.moe.expert_width), or moe for a dense one"
                )
            multiple_of_8("model.width", self.width)

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.head_size or self.width // self.heads

    def eps_of_read(self, branch: int) -> float:
        """The eps of the input norm of branch 0 … 2L−1; 2L is the final norm."""
        return self.norm_eps if self.read_eps is None else self.read_eps[branch]


@dataclass(frozen=True)
class ResidualConfig:
    """The residual method and its options; an option left None takes the method's default (residual/registry.py)."""

    method: str
    branches_per_block: int | None = None
    share_parameters: bool | None = None
    streams: int | None = None
    gate_scale: float | None = None
    rho_bias: float | None = None
    sinkhorn_steps: int | None = None
    value_rank: int | None = None

    def __post_init__(self) -> None:
        settle(self, "residual.")
        if self.branches_per_block is not None:
            positive(self, "residual.", "branches_per_block")
        for name, most in (("streams", MOST_STREAMS), ("sinkhorn_steps", MOST_SINKHORN_STEPS)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise ConfigError(f"residual.{name}={value} is not possible: use 1 or more, and at most {most}")
        if self.value_rank is not None and self.value_rank < 0:
            raise ConfigError(f"residual.value_rank={self.value_rank} is negative: use 0 (a full matrix) or a rank")

    def options(self) -> dict[str, object]:
        """The method's options that were given, without the block size."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {k: v for k, v in given.items() if v is not None and k not in ("method", "branches_per_block")}


@dataclass(frozen=True)
class ParallelConfig:
    """How a model is spread over processes; `engine: fsdp2` shards the rest over those that are left."""

    tensor: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    expert: int = 1
    context: int = 1
    sequence_parallel: bool = False
    zero_stage: int = 0

    def __post_init__(self) -> None:
        settle(self, "train.parallel.")
        positive(self, "train.parallel.", "tensor", "pipeline", "virtual_stages", "expert", "context")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ConfigError(f"train.parallel.zero_stage={self.zero_stage} is unknown: use 0, 1, 2 or 3")


@dataclass(frozen=True)
class TrainConfig:
    """The training recipe. Tokens per step are `global_batch` × `model.context`."""

    dataset: str
    tokens: int
    micro_batch: int
    global_batch: int
    learning_rate: float
    min_learning_rate: float
    warmup_steps: int
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    clip: float = 1.0
    validation_tokens: int = 10_000_000
    seed: int = 42
    precision: Literal["bf16", "fp32"] = "bf16"
    compile: Literal["off", "default", "max-autotune"] = "off"
    recompute: Literal["none", "selective", "full"] = "none"
    documents: Literal["attend", "isolate"] = "attend"
    loss_rows: int = 1024
    engine: Literal["auto", "single", "ddp", "fsdp2", "deepspeed"] = "auto"
    validate_every: int = 1000
    checkpoint_every: int = 1000
    keep_checkpoints: int = 3
    untimed_steps: int = 300
    timeout: float = 1800.0
    peak_flops: float | None = None
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        settle(self, "train.")
        positive(self, "train.", "tokens", "micro_batch", "global_batch", "learning_rate", "clip", "validation_tokens")
        positive(
            self, "train.", "adam_eps", "loss_rows", "validate_every", "checkpoint_every", "keep_checkpoints", "timeout"
        )
        not_negative(self, "train.", "warmup_steps", "weight_decay", "seed", "untimed_steps")
        if self.peak_flops is not None:
            positive(self, "train.", "peak_flops")
        if self.seed >= 2**63:
            raise ConfigError(f"train.seed={self.seed} has more than 63 bits: use a smaller number")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"train.betas={self.betas} are not all in [0, 1): use (0.9, 0.95)")
        if self.global_batch % self.micro_batch:
            raise ConfigError(
                f"train.global_batch={self.global_batch} is not divisible by train.micro_batch={self.micro_batch}: "
                f"use micro_batch {choices(divisors(self.global_batch))}"
            )
        if not 0 <= self.min_learning_rate <= self.learning_rate:
            raise ConfigError(
                f"train.min_learning_rate={self.min_learning_rate} is not between 0 and "
                f"train.learning_rate={self.learning_rate}: use a tenth of it, {self.learning_rate / 10:g}"
            )


@dataclass(frozen=True)
class AnalyzeConfig:
    """A look inside the model while it trains."""

    every: int | None = None  # steps

    def __post_init__(self) -> None:
        settle(self, "analyze.")
        if self.every is not None:
            positive(self, "analyze.", "every")


@dataclass(frozen=True)
class Config:
    """One experiment."""

    model: ModelConfig
    residual: ResidualConfig
    train: TrainConfig
    analyze: AnalyzeConfig = field(default_factory=AnalyzeConfig)

    def __post_init__(self) -> None:
        settle(self, "")
        model, train, parallel = self.model, self.train, self.train.parallel
        step = train.global_batch * model.context
        if train.tokens < step:
            raise ConfigError(
                f"train.tokens={train.tokens} is less than one step of train.global_batch={train.global_batch} × "
                f"model.context={model.context} tokens: use at least {step}"
            )
        if train.warmup_steps > train.tokens // step:
            raise ConfigError(
                f"train.warmup_steps={train.warmup_steps} is more than the {train.tokens // step} steps that "
                f"train.tokens={train.tokens} make: use fewer, a tenth of them say"
            )
        divides("train.parallel.tensor", parallel.tensor, heads=model.heads, kv_heads=model.kv_heads)
        if model.moe is not None:
            divides("train.parallel.expert", parallel.expert, **{"moe.experts": model.moe.experts})
        elif parallel.expert > 1:
            raise ConfigError(f"train.parallel.expert={parallel.expert} needs experts: use 1, or set model.moe")
        if parallel.pipeline > model.layers:
            raise ConfigError(
                f"train.parallel.pipeline={parallel.pipeline} is more than model.layers={model.layers}: "
                f"use at most {model.layers}"
            )
