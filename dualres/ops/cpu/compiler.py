"""Compilation of the kernels, which are cached on disk so that only the first run compiles."""

import hashlib
import logging
from pathlib import Path
from typing import Any

from numba import extending, njit
from numba.core import event

from dualres.ops.dispatch import LOG

SOURCES = Path(__file__).parent
STAMP = "cpu.sources"


def cache_folder() -> Path | None:
    """The folder where numba caches the kernels: next to the sources, NUMBA_CACHE_DIR, or the user's cache folder.

    None if no folder is writable: then every process compiles the kernels itself.
    """
    try:
        return Path(njit(cache=True)(_probe)._cache.cache_path)  # type: ignore[attr-defined]
    except RuntimeError:  # "no locator available"
        return None


def remove_stale(folder: Path) -> None:
    """Remove kernels compiled from other sources: numba only checks the file that defines a kernel."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.py")))).hexdigest()
    stamp = folder / STAMP
    try:
        if stamp.exists() and stamp.read_text() == digest:
            return
        for compiled in [*folder.glob("*.nbi"), *folder.glob("*.nbc")]:
            compiled.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        stamp.write_text(digest)
    except OSError:  # the folder is not writable, so numba caches nothing in it
        return


def _probe() -> None:
    pass


FOLDER = cache_folder()
if FOLDER is not None:
    remove_stale(FOLDER)
OPTIONS: dict[str, Any] = {"nogil": True, "cache": FOLDER is not None, "error_model": "numpy"}


class _Announcement(event.Listener):
    """Logs that a kernel is compiled, not that one is loaded from the cache."""

    def on_start(self, event: Any) -> None:
        if event.data["dispatcher"].py_func.__module__.startswith(str(__package__)):
            cached = f", once: they are cached in {FOLDER}" if FOLDER is not None else ""
            logging.getLogger(LOG).info("compiling CPU kernels%s", cached)

    def on_end(self, event: Any) -> None:
        """Required by numba."""


event.register("numba:compile", _Announcement())


compiled: Any = njit(**OPTIONS)  # sums keep the order they are written in
intrinsic: Any = extending.intrinsic  # for mypy, which would want calls in compiled code to pass the context
