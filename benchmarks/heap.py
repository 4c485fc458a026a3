"""Memory that benchmarks get without waiting for the system to clear new pages."""

import ctypes

TRIM_THRESHOLD, MAP_THRESHOLD = -1, -3  # numbers of glibc's malloc.h


def keep_freed_memory() -> None:
    """Tell the C library not to give freed memory back to the system; only glibc can be told."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(MAP_THRESHOLD, 32 * 2**20)
        library.mallopt(TRIM_THRESHOLD, 2**31 - 1)
