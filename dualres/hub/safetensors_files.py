"""Weights in safetensors: what a folder holds, tensor by tensor, refused where it is something else."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from dualres.util.errors import ModelError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
SHOWN = 2  # names of each kind of fault in a message


class Stored(NamedTuple):
    """One tensor on disk."""

    file: Path
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it: F32, BF16, …


def stored(folder: Path) -> dict[str, Stored]:
    """Every tensor of a model's folder by name. Nothing is ever unpickled."""
    found: dict[str, Stored] = {}
    for file in files(folder):
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  (it is no mapping)
                piece = tensors.get_slice(name)
                found[name] = Stored(file, name, tuple(piece.get_shape()), piece.get_dtype())
    return found


def files(folder: Path) -> list[Path]:
    """The files of weights, which `transformers` reads too: one, or else those that an index names."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        try:
            names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
            named = [folder / Path(name).name for name in sorted(names)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{folder / INDEX} cannot be read ({error!r}): restore it") from None
        missing = [file for file in named if not file.is_file()]
        if missing:
            raise ModelError(f"{missing[0]} is missing, which {INDEX} names: restore it, or download the model again")
        return named
    pickled = [file for file in sorted(folder.iterdir()) if file.suffix in PICKLES] if folder.is_dir() else []
    if pickled:
        raise ModelError(
            f"{pickled[0]} is a pickle, which can run any code when it is loaded, and {folder} has no {SINGLE}: "
            "use the model's safetensors, or convert it where you trust it"
        )
    raise ModelError(f"{folder} has no {SINGLE}: give the folder of a saved model")


def check(found: Mapping[str, Stored], wanted: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Refuse tensors that are missing, too many or of another shape than the config says."""
    missing = [f"{name} is missing" for name in wanted if name not in found]
    foreign = [f"{found[name].file.name} has {name}, which is not part of it" for name in found if name not in wanted]
    misshapen = [
        f"{name} in {found[name].file.name} is {_size(found[name].shape)}, not {_size(wanted[name])}"
        for name in wanted
        if name in found and found[name].shape != tuple(wanted[name])
    ]
    shown = [fault for faults in (missing, foreign, misshapen) for fault in faults[:SHOWN]]
    if shown:
        more = len(missing) + len(foreign) + len(misshapen) - len(shown)
        raise ModelError(
            f"the weights of {folder} do not match its config.json: {'; '.join(shown)}"
            + (f" and {more} more" if more else "")
            + ". Restore both from one place"
        )


def _size(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "a scalar"


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        with file.open("rb") as start:
            begins = start.read(4)
        pickled = begins[:1] == b"\x80" or begins == b"PK\x03\x04"
        what = "is a pickle with another name" if pickled else f"is no whole safetensors file ({error})"
        raise ModelError(f"{file} {what}: restore it, or download the model again") from None
