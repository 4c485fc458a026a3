"""Read and validate the safetensors files of a model folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from dualres.util.errors import ModelError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
SHOWN = 2  # problems of each kind in a message


class Stored(NamedTuple):
    """One tensor on disk."""

    file: Path
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it: F32, BF16, …


def stored(folder: Path) -> dict[str, Stored]:
    """All tensors of a model folder by name. Nothing is ever unpickled."""
    found: dict[str, Stored] = {}
    for file in files(folder):
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                piece = tensors.get_slice(name)
                found[name] = Stored(file, name, tuple(piece.get_shape()), piece.get_dtype())
    return found


def files(folder: Path) -> list[Path]:
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


def check(found: Mapping[str, Stored], shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
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
            f"the weights of {folder} do not match its config.json: {'; '.join(shown)}"
            + (f" and {more} more" if more else "")
            + "; restore both from the same source"
        )


def _size(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "a scalar"


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        with file.open("rb") as start:
            magic = start.read(4)
        problem = f"is not a valid safetensors file, or is truncated ({error})"
        if magic[:1] == b"\x80" or magic == b"PK\x03\x04":
            problem = "is a pickle file with the wrong extension"
        raise ModelError(f"{file} {problem}: restore it, or download the model again") from None
