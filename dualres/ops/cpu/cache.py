"""Compiled kernels are kept on disk, so that only the first run compiles."""

import hashlib
from pathlib import Path

from numba import njit

SOURCES = Path(__file__).parent
STAMP = "cpu.sources"


def folder() -> Path | None:
    """Where numba keeps the kernels: beside the sources, in NUMBA_CACHE_DIR or in the user's own folder.

    Without such a folder every process compiles for itself.
    """
    try:
        return Path(njit(cache=True)(_probe)._cache.cache_path)  # type: ignore[attr-defined]
    except RuntimeError:  # "no locator available"
        return None


def forget_stale(kept: Path) -> None:
    """Remove kernels that were compiled from other sources: numba looks only at the file that a kernel is in."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.py")))).hexdigest()
    stamp = kept / STAMP
    try:
        if stamp.exists() and stamp.read_text() == digest:
            return
        for compiled in [*kept.glob("*.nbi"), *kept.glob("*.nbc")]:
            compiled.unlink(missing_ok=True)
        kept.mkdir(parents=True, exist_ok=True)
        stamp.write_text(digest)
    except OSError:  # a folder that cannot be written to: there numba keeps nothing
        return


def _probe() -> None:
    pass
