"""The folder of a saved model: downloaded from the Hub, checked before loading, and written."""

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
PREFIX = "decoder."  # of the decoder's tensor names in a saved model
NOT_LEARNED = ("rotary_emb.inv_freq",)  # stored in old checkpoints, but computed
DOWNLOADED = ["*.json", "*.jinja", "*.safetensors", "tokenizer*", "*.txt"]
NOT_DOWNLOADED = ["consolidated*"]  # the same weights in Mistral's own format


class Saved(NamedTuple):
    """The config.json and the list of tensors of a model folder."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, safetensors_files.Stored]


def local_folder(source: str) -> Path:
    """Return a local folder, or download config, tokenizer and safetensors of a model on the Hugging Face Hub."""
    if Path(source).is_dir():
        return Path(source)
    hub = need("huggingface_hub", "hub", "a model from the Hugging Face Hub")
    try:
        return Path(hub.snapshot_download(source, allow_patterns=DOWNLOADED, ignore_patterns=NOT_DOWNLOADED))
    except Exception as error:  # network, name or permission
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{source} is neither a folder nor a model on the Hub ({reason})") from None


def read_saved(folder: Path) -> Saved:
    """Read the config and the list of tensors of any saved model, without loading it."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is not a mapping")
    except FileNotFoundError:
        raise ModelError(f"{folder} has no {CONFIG}: pass the folder of a run or of a saved model") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read ({error}): restore it") from None
    return Saved(folder, config, safetensors_files.stored(folder))


def check_saved(saved: Saved) -> Decoder:
    """Check the tensors of a saved dualres model against its config. -> its decoder on the meta device"""
    decoder = empty_decoder(saved)
    shapes = {f"{PREFIX}{name}": tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    safetensors_files.check(saved.tensors, shapes, saved.folder)
    return decoder


def empty_decoder(saved: Saved) -> Decoder:
    """The decoder of a saved dualres model on the meta device, without weights."""
    if saved.config.get("model_type") != MODEL_TYPE:
        raise foreign_model(saved.folder, saved.config.get("model_type"))
    try:
        model = convert(ModelConfig, saved.config.get("model"), "model")
        residual = convert(ResidualConfig, saved.config.get("residual"), "residual")
        return build_decoder(model, residual, device="meta")
    except ConfigError as error:
        raise ModelError(f"{saved.folder / CONFIG}: {error}. Restore the file, or export the model again") from None


def foreign_model(folder: Path, model_type: object) -> ModelError:
    """The error for a model of another architecture where a dualres model is required."""
    return ModelError(
        f"{folder} has a {model_type} model: convert it to a dualres model with "
        f"`dualres convert {folder} OUT --residual standard`"
    )


def load_tokenizer(folder: Path) -> Any | None:
    """The `transformers` tokenizer of a saved model; None if there is none."""
    if not any((folder / name).exists() for name in (TOKENIZER, "tokenizer_config.json", "tokenizer.model")):
        return None
    transformers = need("transformers", "hub", "a Hugging Face tokenizer")
    with read_by_transformers(folder):
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


@contextmanager
def read_by_transformers(path: Path) -> Iterator[None]:
    """Turn any exception that `transformers` raises for an unreadable file or folder into a `ModelError`."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(f"transformers cannot read {path}: {reason:.500}") from None


def check_new(folder: Path) -> None:
    """Raise if the folder is not empty, before any work is done."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ModelError(f"{folder} exists and is not empty: use another folder, or remove it")


def write_model(model: Any, tokenizer: Any | None, card: str, folder: Path) -> None:
    """Write weights, config, tokenizer and model card to a folder."""
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # raised for a full disk too, which is an OS error
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(folder)) from None
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    write_text(folder / CARD, card)
