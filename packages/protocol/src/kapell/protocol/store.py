"""Where batches wait between calls: the store protocol, and one in this process's memory."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["MemoryStore", "Store", "reference_key"]


class Store(Protocol):
    """What a store offers. References are its own small, picklable values; values are what `put` was given."""

    def put(self, value: Any) -> Any:
        """Keep a value and give a reference to it."""
        ...

    def get(self, refs: Sequence[Any], *, timeout: float | None = None) -> list[Any]:
        """Give the values, private to the caller, in order; wait for those that are still being made.

        Raises TimeoutError after ``timeout`` seconds, and whatever the making of a value raised.
        """
        ...

    def wait(self, refs: Sequence[Any], *, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        """Wait until all are there or the time is over; give those that are there and those that are not."""
        ...


class MemoryStore:
    """A store in this process: for tests, and for programs that have no other.

    >>> store = MemoryStore()
    >>> store.get([store.put([1, 2])])
    [[1, 2]]
    """

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}
        self._numbers = itertools.count()
        self._changed = threading.Condition()

    def promise(self) -> int:
        """Give a reference whose value comes later, by `fulfil`."""
        return next(self._numbers)

    def fulfil(self, ref: int, value: Any) -> None:
        """Give a promised reference its value."""
        with self._changed:
            self._values[ref] = value
            self._changed.notify_all()

    def put(self, value: Any) -> int:
        """Keep a value."""
        ref = self.promise()
        self.fulfil(ref, value)
        return ref

    def get(self, refs: Sequence[int], *, timeout: float | None = None) -> list[Any]:
        """Give copies of the values."""
        _, missing = self.wait(refs, timeout=timeout)
        if missing:
            raise TimeoutError(f"{len(missing)} of {len(refs)} values were not there after {timeout} s")
        return [copy.deepcopy(self._values[ref]) for ref in refs]

    def wait(self, refs: Sequence[int], *, timeout: float | None = None) -> tuple[list[int], list[int]]:
        """Wait for the values."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while missing := [ref for ref in refs if ref not in self._values]:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
        return [ref for ref in refs if ref not in missing], missing


def reference_key(ref: Any) -> Any:
    """Give what tells a reference from others: itself where it can be hashed."""
    try:
        hash(ref)
    except TypeError:
        return id(ref)
    return ref
