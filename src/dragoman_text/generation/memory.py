"""Return memory that the C library retains after large allocations, and measure what is free."""

import contextlib
import ctypes
import os


def release_memory() -> None:
    """Return freed memory to the system (glibc only)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def share_of_free_memory() -> int:
    """Return a quarter of the memory that is free now, in bytes, for the cache of a model; 1 GiB if it is unknown."""
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    return 2**30
