"""Memory of a process that trains on a CPU: kept from one step to the next."""

import ctypes
import os

NEVER_TRIM, NEVER_MAP = (-1, -1), (-4, 0)  # options of glibc's malloc.h, each with its value


def keep_freed_memory() -> None:
    """Tell the C library not to give freed memory back to the system, which clears every page before it is had again.

    Every step frees and takes the same tensors. Only glibc can be told, and it is not where its user has set `MALLOC_…`
    or `GLIBC_TUNABLES`.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, TypeError, OSError):  # another C library, or a system where a program has no handle
        return
    for option in (NEVER_TRIM, NEVER_MAP):
        mallopt(*option)
