"""Errors of transformers and safetensors, in one form."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from dualres.util.errors import ModelError


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


@contextmanager
def written_by_safetensors(folder: Path) -> Iterator[None]:
    """Turn the error that safetensors raises for a full disk into an `OSError`."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(folder)) from None
