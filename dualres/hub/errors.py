"""What a model that was given can be wrong about, and how the libraries say it."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


class ModelError(ValueError):
    """A model's folder that cannot be used, or a kind of model that cannot be made: the message names the remedy."""


@contextmanager
def read_by_transformers(what: Path) -> Iterator[None]:
    """What `transformers` makes of a file or folder that it cannot read has many forms; this is one."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(f"transformers cannot read {what}: {reason:.500}") from None


@contextmanager
def written_by_safetensors(folder: Path) -> Iterator[None]:
    """A full disk is the system's error, also where safetensors tells it as one of its own."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(folder)) from None
