"""Memory of large results that nobody uses any more, kept for the next ones: fresh pages cost as much as the copy."""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np

__all__ = ["SPARE", "SpareMemory", "release_spare_memory"]

_MOST_WASTE = 1.25  # a block that is used again may be larger than asked by this
_KEPT_BYTES = 1 << 30


class SpareMemory:
    """Blocks of memory, handed out as arrays and taken back when no array or tensor looks at them any more.

    At most ``limit`` bytes wait to be used again; what has waited longest goes back to the system first. There is no
    lock: blocks come back from finalizers, which run in any thread at any time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._spare: deque[mmap.mmap] = deque()  # what has waited longest is first

    @property
    def nbytes(self) -> int:
        """Bytes that wait to be used again."""
        return sum(map(len, self._spare.copy()))

    def array(self, nbytes: int) -> np.ndarray:
        """Writable bytes with anything in them, ``(nbytes,)``. Raises ``MemoryError`` when there is no room."""
        block = self._fitting(nbytes) or _fresh_block(nbytes)
        if block is None:
            return np.empty(nbytes, dtype=np.uint8)
        lease = _Lease(block, nbytes)
        weakref.finalize(lease, self._take_back, block).atexit = False
        return np.asarray(lease)

    def release(self) -> None:
        """Give all that waits back to the system."""
        self._spare.clear()

    def _fitting(self, nbytes: int) -> mmap.mmap | None:
        passed_over: list[mmap.mmap] = []
        found = None
        with suppress(IndexError):
            while found is None:
                block = self._spare.popleft()
                if nbytes <= len(block) <= nbytes * _MOST_WASTE:
                    found = block
                else:
                    passed_over.append(block)
        self._spare.extendleft(reversed(passed_over))
        return found

    def _take_back(self, block: mmap.mmap) -> None:
        self._spare.append(block)
        with suppress(IndexError):
            while self.nbytes > self._limit:
                self._spare.popleft()


class _Lease:
    """The one owner of a block: views of views keep their owner alive, and not each other."""

    def __init__(self, block: mmap.mmap, nbytes: int) -> None:
        self.__array_interface__: dict[str, Any] = np.frombuffer(block, np.uint8, nbytes).__array_interface__


def _fresh_block(nbytes: int) -> mmap.mmap | None:
    """A block on huge pages; None where the system has none or no room."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        block = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    with suppress(OSError):  # a kernel without them
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


SPARE = SpareMemory(_KEPT_BYTES)
"""That of this process."""


def release_spare_memory() -> None:
    """Give the memory of large results that nobody uses any more back to the system; up to 1 GiB is kept otherwise.

    ``torch.cuda.empty_cache`` does the same for a GPU.
    """
    SPARE.release()
