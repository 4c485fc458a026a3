"""A saved model's folder: written whole or not at all, checked before it is loaded."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dualres.config.schema import ConfigError, ModelConfig, ResidualConfig
from dualres.config.validation import build
from dualres.hub import safetensors_files
from dualres.hub.errors import written_by_safetensors
from dualres.model.decoder import Decoder, build_decoder
from dualres.util.atomic_files import is_free, new_folder, write_text
from dualres.util.errors import ModelError

CONFIG, CARD = "config.json", "README.md"
MODEL_TYPE = "dualres"
PREFIX = "decoder."  # of our tensors' names in a saved model
NOT_LEARNED = ("rotary_emb.inv_freq",)  # tensors of old checkpoints that are computed


class Saved(NamedTuple):
    """What a folder's config.json says, and the tensors that it has."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, safetensors_files.Stored]


def read_saved(folder: Path) -> Saved:
    """Config and list of tensors of any saved model, nothing loaded yet."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it holds no mapping")
    except FileNotFoundError:
        raise ModelError(f"{folder} has no {CONFIG}: give the folder of a run or of a saved model") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read ({error}): restore it") from None
    return Saved(folder, config, safetensors_files.stored(folder))


def is_exported(folder: Path) -> bool:
    """Whether a folder holds a saved dualres model."""
    try:
        return json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("model_type") == MODEL_TYPE
    except (OSError, ValueError, AttributeError):
        return False


def check_saved(saved: Saved) -> Decoder:
    """Compare the tensors of a saved dualres model with its config. -> its decoder on the meta device"""
    decoder = empty_decoder(saved)
    wanted = {f"{PREFIX}{name}": tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    safetensors_files.check(saved.tensors, wanted, saved.folder)
    return decoder


def empty_decoder(saved: Saved) -> Decoder:
    """The decoder of a saved dualres model on the meta device: shapes without weights."""
    if saved.config.get("model_type") != MODEL_TYPE:
        raise foreign_model(saved.folder, saved.config.get("model_type"))
    try:
        model = build(ModelConfig, _section(saved, "model"), "model.")
        residual = build(ResidualConfig, _section(saved, "residual"), "residual.")
        return build_decoder(model, residual, device="meta")
    except ConfigError as error:
        raise ModelError(f"{saved.folder / CONFIG}: {error}") from None


def foreign_model(folder: Path, model_type: object) -> ModelError:
    """What to say of a model that is not ours where only ours will do."""
    return ModelError(
        f"{folder} holds a {model_type} model: make it a dualres model with "
        f"`dualres convert {folder} OUT --residual standard`"
    )


def _section(saved: Saved, name: str) -> dict[str, Any]:
    section = saved.config.get(name)
    if not isinstance(section, dict):
        raise ConfigError(f"{name}={section!r} is no section: restore the file, or export the model again")
    return section


def check_new(folder: Path) -> None:
    """Refuse a folder that has something in it, before any work is done for it."""
    if not is_free(folder):
        raise _taken(folder)


@contextmanager
def new_model_folder(folder: Path) -> Iterator[Path]:
    """Where to write a model's files; the folder gets its name when they are all there."""
    with new_folder(folder, _taken(folder)) as partial:
        yield partial


def _taken(folder: Path) -> ModelError:
    return ModelError(f"{folder} is there already and not empty: choose another name, or remove it")


def write_model(model: Any, tokenizer: Any | None, card: str, folder: Path) -> None:
    """Weights, config, tokenizer and card of a model into a folder."""
    with written_by_safetensors(folder):
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    write_text(folder / CARD, card)
