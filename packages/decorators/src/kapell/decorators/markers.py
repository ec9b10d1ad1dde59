"""Explicit words at the call site for arguments that a mode would otherwise lay out by itself."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["PerWorker", "Replicate"]


@dataclass(frozen=True)
class Replicate:
    """The whole value goes to every rank that runs, whatever the mode would do with it.

    >>> Replicate([1, 2, 3]).value
    [1, 2, 3]
    """

    value: Any
    """What every rank receives; it is shipped once."""


@dataclass(frozen=True, init=False)
class PerWorker:
    """One value for each rank of the group, in rank order; the number must equal the world size.

    >>> PerWorker(["a", "b"]).values
    ('a', 'b')
    """

    values: tuple[Any, ...]
    """Entry `i` goes to rank `i`; an object that occurs several times is shipped once."""

    def __init__(self, values: Iterable[Any]):
        object.__setattr__(self, "values", tuple(values))
