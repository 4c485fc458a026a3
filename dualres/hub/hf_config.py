"""The config that `transformers` keeps of a dualres model: the two sections of an experiment that make a model."""

import dataclasses
import importlib
import importlib.util
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from dualres.config.schema import ConfigError, ModelConfig, ResidualConfig
from dualres.config.validation import build


class DualResConfig(PreTrainedConfig):
    """The sections `model` and `residual` of an experiment; sizes also under the names that `transformers` uses."""

    model_type = "dualres"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]  # Trainer adds lists to it

    model: dict[str, Any] | None = None
    residual: dict[str, Any] | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    @classmethod
    def of(cls, model: ModelConfig, residual: ResidualConfig, **others: Any) -> "DualResConfig":
        """The config of a decoder."""
        return cls(model=dataclasses.asdict(model), residual=residual.to_dict(), **others)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """config.json, and the code that loads the model where dualres is not installed."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if self._auto_class is None and importlib.util.find_spec("dualres") is not None:
            # A copy of this code that came with a model has `_auto_class`, and transformers copies it on.
            importlib.import_module("dualres.hub.remote_code").add_code(Path(save_directory))

    @property
    def model_config(self) -> ModelConfig:
        """The section `model`, checked."""
        return build(ModelConfig, self._section("model"), "model.")

    @property
    def residual_config(self) -> ResidualConfig:
        """The section `residual`, checked."""
        return build(ResidualConfig, self._section("residual"), "residual.")

    def _section(self, name: str) -> dict[str, Any]:
        section = getattr(self, name)
        if not isinstance(section, dict):
            raise ConfigError(f"{name}={section!r} of the config is no section: restore config.json, or export again")
        return section

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary."""
        return self.model_config.vocab_size

    @vocab_size.setter
    def vocab_size(self, value: int) -> None:
        self.model = {**self._section("model"), "vocab_size": value}

    @property
    def hidden_size(self) -> int:
        """The width of a stream."""
        return self.model_config.width

    @property
    def num_hidden_layers(self) -> int:
        """Transformer layers."""
        return self.model_config.layers

    @property
    def num_attention_heads(self) -> int:
        """Query heads."""
        return self.model_config.heads

    @property
    def num_key_value_heads(self) -> int:
        """Key and value heads, which a cache holds."""
        return self.model_config.kv_heads

    @property
    def head_dim(self) -> int:
        """The width of one head."""
        return self.model_config.head_width

    @property
    def max_position_embeddings(self) -> int:
        """The context."""
        return self.model_config.context
