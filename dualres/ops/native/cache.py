"""Compiled kernels are kept on disk, beside the sources, so that only the first run compiles."""

import hashlib
from pathlib import Path

from numba import njit

FOLDER = Path(__file__).parent
STAMP = "native.sources"


def forget_stale() -> None:
    """Remove kernels that were compiled from other sources: numba looks only at the file that a kernel is in."""
    kept = FOLDER / "__pycache__"
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(FOLDER.glob("*.py")))).hexdigest()
    stamp = kept / STAMP
    try:
        if stamp.exists() and stamp.read_text() == digest:
            return
        for compiled in [*kept.glob("*.nbi"), *kept.glob("*.nbc")]:
            compiled.unlink(missing_ok=True)
        kept.mkdir(exist_ok=True)
        stamp.write_text(digest)
    except OSError:  # a folder that cannot be written to: there numba keeps nothing, or in the user's own folder
        return


def possible() -> bool:
    """Whether there is a folder to keep kernels in; without one every process compiles for itself."""
    try:
        njit(cache=True)(_probe)
    except RuntimeError:  # "no locator available"
        return False
    return True


def _probe() -> None:
    pass
