"""Files that are whole or not there: written under a temporary name, brought to the disk, then renamed."""

import json
import os
from pathlib import Path
from typing import IO, Any

PARTIAL = ".partial"


def partial_of(path: Path) -> Path:
    """The temporary name of a file or folder that is being written."""
    return path.with_name(path.name + PARTIAL)


def flush(file: IO[Any]) -> None:
    """Bring an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace the file `path` as a whole."""
    partial = partial_of(path)
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            flush(file)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def write_json(path: Path, data: Any) -> None:
    """Replace the file `path` as a whole."""
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
