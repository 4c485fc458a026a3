"""The folder of a saved model: fetched from the hub, checked before it is loaded, written whole or not at all."""

import errno
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from dualres.config.schema import ConfigError, ModelConfig, ResidualConfig
from dualres.config.validation import convert
from dualres.data.shards import TOKENIZER
from dualres.hub import safetensors_files
from dualres.model.decoder import Decoder, build_decoder
from dualres.util.atomic_files import write_text
from dualres.util.errors import ModelError
from dualres.util.optional_dependencies import need

CONFIG, CARD = "config.json", "README.md"
MODEL_TYPE = "dualres"
PREFIX = "decoder."  # of our tensors' names in a saved model
NOT_LEARNED = ("rotary_emb.inv_freq",)  # tensors of old checkpoints that are computed
FETCHED = ["*.json", "*.jinja", "*.safetensors", "tokenizer*", "*.txt"]
NOT_FETCHED = ["consolidated*"]  # the same weights in Mistral's own form


class Saved(NamedTuple):
    """What a folder's config.json says, and the tensors that it has."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, safetensors_files.Stored]


def local_folder(source: str) -> Path:
    """A folder as it is; a name on the Hugging Face hub is fetched: config, tokenizer and safetensors, nothing else."""
    if Path(source).is_dir():
        return Path(source)
    hub = need("huggingface_hub", "hub", "a model from the Hugging Face hub")
    try:
        found = hub.snapshot_download(source, allow_patterns=FETCHED, ignore_patterns=NOT_FETCHED)
    except Exception as error:  # of the network, the name, the permission
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{source} is neither a folder nor a model that the hub has ({reason})") from None
    return Path(found)


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
        model = convert(ModelConfig, saved.config.get("model"), "model")
        residual = convert(ResidualConfig, saved.config.get("residual"), "residual")
        return build_decoder(model, residual, device="meta")
    except ConfigError as error:
        raise ModelError(f"{saved.folder / CONFIG}: {error}") from None


def foreign_model(folder: Path, model_type: object) -> ModelError:
    """The refusal of a model that is not ours where only ours will do."""
    return ModelError(
        f"{folder} holds a {model_type} model: make it a dualres model with "
        f"`dualres convert {folder} OUT --residual standard`"
    )


def load_tokenizer(folder: Path) -> Any | None:
    """The tokenizer of `transformers` beside a saved model, None where there is none."""
    if not any((folder / name).exists() for name in (TOKENIZER, "tokenizer_config.json", "tokenizer.model")):
        return None
    transformers = need("transformers", "hub", "a Hugging Face tokenizer")
    with read_by_transformers(folder):
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


@contextmanager
def read_by_transformers(what: Path) -> Iterator[None]:
    """Turn whatever `transformers` raises for a file or folder that it cannot read into a `ModelError`."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(f"transformers cannot read {what}: {reason:.500}") from None


def check_new(folder: Path) -> None:
    """Refuse a folder that has something in it, before any work is done for it."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ModelError(f"{folder} exists and is not empty: choose another name, or remove it")


def write_model(model: Any, tokenizer: Any | None, card: str, folder: Path) -> None:
    """Weights, config, tokenizer and card of a model into a folder."""
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # also for a full disk, which is the system's error
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(folder)) from None
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    write_text(folder / CARD, card)
