"""The `transformers` config of a dualres model: the sections `model` and `residual` of an experiment."""

import dataclasses
import importlib
import importlib.util
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from dualres.config.plugins import REGISTERED
from dualres.config.schema import ModelConfig, ResidualConfig
from dualres.config.validation import convert


def _size(key: str) -> Any:
    return property(lambda self: getattr(self.model_config, key))


class DualResConfig(PreTrainedConfig):
    """The sections `model` and `residual` of an experiment; sizes are also available by the names of `transformers`."""

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
        if residual.method in REGISTERED:
            others["plugin"] = REGISTERED[residual.method]
        return cls(model=dataclasses.asdict(model), residual=residual.to_dict(), **others)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save config.json, and the code that loads the model where dualres is not installed.

        The method of a plugin is not part of that code, so its models need dualres and the plugin.
        """
        super().save_pretrained(save_directory, *args, **kwargs)
        is_ours = getattr(self, "plugin", None) is None
        if is_ours and self._auto_class is None and importlib.util.find_spec("dualres") is not None:
            # A copy of this code that came with a model has `_auto_class`: transformers copies it itself.
            importlib.import_module("dualres.hub.remote_code").add_code(Path(save_directory))

    @property
    def model_config(self) -> ModelConfig:
        return convert(ModelConfig, self.model, "model")

    @property
    def residual_config(self) -> ResidualConfig:
        return convert(ResidualConfig, self.residual, "residual")

    @property
    def vocab_size(self) -> int:
        return self.model_config.vocab_size

    @vocab_size.setter
    def vocab_size(self, value: int) -> None:
        self.model = {**(self.model or {}), "vocab_size": value}

    hidden_size = _size("width")
    num_hidden_layers = _size("layers")
    num_attention_heads = _size("heads")
    num_key_value_heads = _size("kv_heads")
    head_dim = _size("head_width")
    max_position_embeddings = _size("context")
