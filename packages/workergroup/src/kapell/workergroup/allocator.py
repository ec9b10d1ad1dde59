"""Keeping the memory that a call frees for the next one."""

import ctypes
import os

__all__ = ["keep_freed_memory"]

# mallopt's numbers for what the variables of glibc set, from its malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_")
_LARGEST_KEPT = 1 << 30  # bytes; larger blocks come from the system and go back to it
_LARGEST_KEPT_BY_OLD_GLIBC = 1 << 25
_KEPT_AT_MOST = (1 << 31) - 1
_GROWS_BY = 1 << 26


def keep_freed_memory() -> bool:
    """Have this process keep up to 2 GiB of the memory that it frees, instead of giving it back to the system.

    The system clears each page that it gives out, which can cost more than filling it, and a worker takes and frees the
    same amounts in each call. In return its process stays as large as it once was. These are settings of the C library
    for the whole process; where its environment has them (``MALLOC_TRIM_THRESHOLD_`` and the like), that decides.

    False when nothing was set: for that reason, or where the C library is not glibc.
    """
    if any(name in os.environ for name in _VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    kept = mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT) or mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BY_OLD_GLIBC)
    return bool(kept and mallopt(_TRIM_THRESHOLD, _KEPT_AT_MOST) and mallopt(_TOP_PAD, _GROWS_BY))
