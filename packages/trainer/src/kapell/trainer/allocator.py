"""Keeping the memory of a pass for the next one, on the CPU, as torch does on a GPU."""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]

# mallopt's names for them, in malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_KEPT = 1 << 30  # bytes; larger tensors come from the system and go back to it
_LARGEST_KEPT_BEFORE_GLIBC_2_35 = 1 << 25
_KEPT_AT_MOST = (1 << 31) - 1
_GROWS_BY = 1 << 26


def keep_freed_memory() -> bool:
    """Have this process keep the memory that it frees, up to 2 GiB in a row, instead of giving it back to the system.

    The system clears each page that it gives out. A training step on the CPU takes and frees its activations anew each
    time, and spends a third of its time on that; in return the process stays as large as it once was. Changes the C
    library's settings for the whole process. False where that library is not glibc, and nothing is changed.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT) or mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BEFORE_GLIBC_2_35)
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, _KEPT_AT_MOST) and mallopt(_M_TOP_PAD, _GROWS_BY))
