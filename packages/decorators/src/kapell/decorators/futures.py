"""Results that are not there yet, as arguments of the next call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from kapell.decorators.columns import only
from kapell.decorators.rows import part_of
from kapell.decorators.splitting import splitter_of

__all__ = ["Future", "FutureEntry", "FuturePart", "is_future", "materialize"]


class Future(Protocol):
    """Anything with `__kapell_future__ = True` and `get(timeout=...)`."""

    __kapell_future__: bool

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the value."""
        ...


def is_future(value: Any) -> TypeGuard[Future]:
    """Whether a value is one of ours to wait for (an asyncio or concurrent future is not)."""
    return getattr(type(value), "__kapell_future__", False) is True


def materialize(
    args: Sequence[Any], kwargs: Mapping[str, Any], reads: Sequence[str] = ()
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with each future replaced by its value, of whose columns only those among `reads` are kept.

    The worker's side of a backend calls this before it calls a method whose label says `materialize_futures`.

    >>> materialize((1,), {"b": 2})
    ((1,), {'b': 2})
    """
    return tuple(_value(arg, reads) for arg in args), {name: _value(arg, reads) for name, arg in kwargs.items()}


@dataclass(frozen=True)
class FuturePart:
    """The rows of one shard of a result that isn't there yet: cut where it is used, by the worker."""

    future: Future
    """A future that cannot be chunked before its value is known."""
    index: int
    """Which shard."""
    count: int
    """Of how many."""

    __kapell_future__ = True

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the whole value and cut this shard's rows out of it; a value without rows comes whole."""
        value = self.future.get(timeout=timeout)
        splitter = splitter_of(value)
        return value if splitter is None else part_of(value, splitter, self.index, self.count)


@dataclass(frozen=True)
class FutureEntry:
    """One rank's entry of a list that isn't there yet."""

    future: Future
    """A future of a list with one entry a rank."""
    rank: int
    """Whose entry."""
    world_size: int
    """How many entries there must be."""

    __kapell_future__ = True

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the list and take this rank's entry."""
        entries = self.future.get(timeout=timeout)
        if not isinstance(entries, list | tuple) or len(entries) != self.world_size:
            found = f"{len(entries)} entries" if isinstance(entries, list | tuple) else type(entries).__name__
            raise ValueError(f"a future argument needs one entry for each of {self.world_size} ranks, got {found}")
        return entries[self.rank]


def _value(value: Any, reads: Sequence[str]) -> Any:
    if not is_future(value):
        return value
    while is_future(value):  # a call may give a reference to what it has made
        value = (only(value, reads) if reads else value).get()
    return only(value, reads) if reads else value
