"""How the kernels are compiled; on disk they are cached, so that only the first run compiles."""

import hashlib
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.compiler import Compiler

SOURCES = Path(__file__).parent
STAMP = "cpu.sources"


def cache_folder() -> Path | None:
    """Where numba caches the kernels: beside the sources, in NUMBA_CACHE_DIR or in the user's own folder.

    Without such a folder every process compiles for itself.
    """
    try:
        return Path(njit(cache=True)(_probe)._cache.cache_path)  # type: ignore[attr-defined]
    except RuntimeError:  # "no locator available"
        return None


def remove_stale(folder: Path) -> None:
    """Remove kernels that were compiled from other sources: numba looks only at the file that a kernel is in."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.py")))).hexdigest()
    stamp = folder / STAMP
    try:
        if stamp.exists() and stamp.read_text() == digest:
            return
        for compiled in [*folder.glob("*.nbi"), *folder.glob("*.nbc")]:
            compiled.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        stamp.write_text(digest)
    except OSError:  # a folder that cannot be written to: there numba caches nothing
        return


def _probe() -> None:
    pass


FOLDER = cache_folder()
if FOLDER is not None:
    remove_stale(FOLDER)
OPTIONS: dict[str, Any] = {"nogil": True, "cache": FOLDER is not None, "error_model": "numpy"}


class NoAlias(Compiler):
    """Compiles functions that are never given overlapping rows, one of which they write.

    Otherwise LLVM compares addresses when a loop starts, and where short rows lie close together it takes another loop,
    which adds up in another order: the same numbers would give other bits at other addresses.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.state.flags.noalias = True


compiled: Any = njit(**OPTIONS)  # sums are added up in the order they are written in
# Sums may be reordered, which is what makes them vector instructions; NaN and infinity keep their meaning.
compiled_rows: Any = njit(**OPTIONS, fastmath={"reassoc", "nsz", "contract", "arcp"}, pipeline_class=NoAlias)
