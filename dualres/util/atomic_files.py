"""Atomic files: written under a temporary name, flushed to disk, then renamed; and JSON without NaN and infinity."""

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

PARTIAL, LOCK = ".partial", "lock"


def partial_of(path: Path) -> Path:
    """The temporary name of a file or folder while it is written."""
    return path.with_name(path.name + PARTIAL)


def flush(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to OS errors that lack one, such as for a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def locked(folder: Path, error: Exception) -> Iterator[None]:
    """Lock a folder, or raise `error` if it is locked. The OS releases the lock even if the process is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        try:
            with naming(folder / LOCK):  # not all file systems support locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise error from None
        yield


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `path` on success; `path` must be new or empty."""
    path = path.resolve()  # "." has no name
    partial = partial_of(path)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in partial.rglob("*"):
            if file.is_file():
                with file.open("rb+") as written:
                    flush(written)
        flush_folder(partial)
        if path.exists():
            path.rmdir()
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    flush_folder(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the file atomically."""
    partial = partial_of(path)
    try:
        with naming(path), partial.open("wb") as file:
            file.write(data)
            flush(file)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, data: Any) -> None:
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def nonfinite_to_null(data: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, with None in nested dicts, lists and tuples."""
    if isinstance(data, dict):
        return {key: nonfinite_to_null(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [nonfinite_to_null(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
