"""What calls by reference leave with workers in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .isolation import isolate

__all__ = ["KeptHere"]


class _Kept:
    """A value; it is let go of with the last reference to it."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True)
class KeptHere:
    """The store of in-process workers, as `kapell.protocol.Store` describes one; all of them are one."""

    def put(self, value: Any) -> _Kept:
        """Keep a private copy of a value."""
        return _Kept(isolate(value))

    def get(self, refs: Sequence[_Kept], *, timeout: float | None = None) -> list[Any]:
        """Private copies of the values."""
        return [isolate(ref.value) for ref in refs]

    def wait(self, refs: Sequence[_Kept], *, timeout: float | None = None) -> tuple[list[_Kept], list[_Kept]]:
        """All of them are there."""
        return list(refs), []
