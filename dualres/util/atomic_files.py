"""Files that are whole or not there: written under a temporary name, brought to the disk, then renamed."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

PARTIAL, LOCK = ".partial", "lock"


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


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of the system says which file it is about, where the system does not: a full disk, say."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def locked(folder: Path, refusal: Exception) -> Iterator[None]:
    """Hold a folder for this process alone, or raise `refusal`. The system frees it even when the process is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        try:
            with naming(folder / LOCK):  # some file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise refusal from None
        yield


def is_free(path: Path) -> bool:
    """Whether nothing is there, or an empty folder."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


@contextmanager
def new_folder(path: Path, refusal: Exception) -> Iterator[Path]:
    """A folder to write into, which gets its name when all is well; `refusal` where there is something already."""
    path = path.resolve()  # "." has no name to write beside
    if not is_free(path):
        raise refusal
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
    """Replace the file `path` as a whole."""
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
    """Replace the file `path` as a whole."""
    write_bytes(path, text.encode())


def write_json(path: Path, data: Any) -> None:
    """Replace the file `path` as a whole."""
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
