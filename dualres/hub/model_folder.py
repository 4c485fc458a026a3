"""The folder of a saved model: downloaded from the Hub, config and safetensors checked before loading, and written."""

import errno
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from dualres.config.schema import ConfigError, ModelConfig, ResidualConfig
from dualres.config.validation import convert, suggesting_path
from dualres.data.shards import TOKENIZER
from dualres.model.decoder import Decoder, build_decoder
from dualres.residual import registry
from dualres.util.atomic_files import write_text
from dualres.util.errors import ModelError
from dualres.util.optional_dependencies import need

CONFIG, CARD = "config.json", "README.md"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
SHOWN = 2  # problems of each kind in a message
MODEL_TYPE = "dualres"
PREFIX = "decoder."  # of the decoder's tensor names in a saved model
NOT_LEARNED = ("rotary_emb.inv_freq",)  # stored in old checkpoints, but computed
DOWNLOADED = ["*.json", "*.jinja", "*.safetensors", "tokenizer*", "*.txt"]
NOT_DOWNLOADED = ["consolidated*"]  # the same weights in Mistral's own format


class Stored(NamedTuple):
    """One tensor on disk."""

    file: Path
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it: F32, BF16, …


class Saved(NamedTuple):
    """The config.json and the list of tensors of a model folder."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Stored]


def local_folder(source: str) -> Path:
    """Return a local folder, or download config, tokenizer and safetensors of a model on the Hugging Face Hub."""
    if Path(source).is_dir():
        return Path(source)
    hub = need("huggingface_hub", "hub", "a model from the Hugging Face Hub")
    try:
        return Path(hub.snapshot_download(source, allow_patterns=DOWNLOADED, ignore_patterns=NOT_DOWNLOADED))
    except Exception as error:  # network, name or permission
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        remedy = "check the name, the network and your access to it"
        raise ModelError(f"{source} is neither a folder nor a model on the Hub ({reason}): {remedy}") from None


def read_saved(folder: Path) -> Saved:
    """Read the config and the list of tensors of any saved model, without loading it."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is not a mapping")
    except FileNotFoundError:
        message = f"{folder} has no {CONFIG}: pass the folder of a run or of a saved model"
        raise ModelError(suggesting_path(message, folder)) from None
    except (ValueError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read ({error}): restore it") from None
    return Saved(folder, config, stored_tensors(folder))


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of a model folder by name. Nothing is ever unpickled."""
    found: dict[str, Stored] = {}
    for file in weight_files(folder):
        with _open_weights(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                piece = tensors.get_slice(name)
                found[name] = Stored(file, name, tuple(piece.get_shape()), piece.get_dtype())
    return found


def weight_files(folder: Path) -> list[Path]:
    """The weight files, as `transformers` finds them: a single one, or those listed in an index."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        try:
            names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
            listed = [folder / Path(name).name for name in sorted(names)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{folder / INDEX} cannot be read ({error!r}): restore it") from None
        missing = [file for file in listed if not file.is_file()]
        if missing:
            raise ModelError(f"{missing[0]}, listed in {INDEX}, is missing: restore it, or download the model again")
        return listed
    pickles = [file for file in sorted(folder.iterdir()) if file.suffix in PICKLES] if folder.is_dir() else []
    if pickles:
        raise ModelError(
            f"{pickles[0]} is a pickle file, which can execute arbitrary code when loaded, and there is no {SINGLE}: "
            "use the model's safetensors, or convert it in an environment you trust"
        )
    raise ModelError(f"{folder} has no {SINGLE}: pass the folder of a saved model")


def _open_weights(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        with file.open("rb") as start:
            magic = start.read(4)
        problem = f"is not a valid safetensors file, or is truncated ({error})"
        if magic[:1] == b"\x80" or magic == b"PK\x03\x04":
            problem = "is a pickle file with the wrong extension"
        raise ModelError(f"{file} {problem}: restore it, or download the model again") from None


def check_saved(saved: Saved) -> Decoder:
    """Check the tensors of a saved dualres model against its config. -> its decoder on the meta device"""
    decoder = empty_decoder(saved)
    shapes = {f"{PREFIX}{name}": tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    check_tensors(saved.tensors, shapes, saved.folder)
    return decoder


def check_tensors(found: Mapping[str, Stored], shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Raise if a tensor is missing, unexpected, or differs in shape from the config."""
    missing = [f"{name} is missing" for name in shapes if name not in found]
    unexpected = [f"{name} in {found[name].file.name} is unexpected" for name in found if name not in shapes]
    misshapen = [
        f"{name} in {found[name].file.name} is {_size(found[name].shape)}, not {_size(shapes[name])}"
        for name in shapes
        if name in found and found[name].shape != tuple(shapes[name])
    ]
    shown = [problem for kind in (missing, unexpected, misshapen) for problem in kind[:SHOWN]]
    if shown:
        more = len(missing) + len(unexpected) + len(misshapen) - len(shown)
        raise ModelError(
            f"the weights of {folder} do not match its {CONFIG}: {'; '.join(shown)}"
            + (f" and {more} more" if more else "")
            + "; restore both from the same source"
        )


def _size(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "a scalar"


def empty_decoder(saved: Saved) -> Decoder:
    """The decoder of a saved dualres model on the meta device, without weights."""
    if saved.config.get("model_type") != MODEL_TYPE:
        raise foreign_model(saved.folder, saved.config.get("model_type"))
    try:
        model = convert(ModelConfig, saved.config.get("model"), "model")
        residual = convert(ResidualConfig, saved.config.get("residual"), "residual")
        registry.check_known(residual.method, saved.config.get("plugin"), saved.folder)
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
        remedy = "restore it from its source, or upgrade transformers"
        raise ModelError(f"transformers cannot read {path}: {reason:.500}; {remedy}") from None


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
