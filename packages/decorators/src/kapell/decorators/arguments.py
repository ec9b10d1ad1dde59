"""One argument at a time: where it stands in the call, and its layout over ranks where no rows are split."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kapell.decorators import columns
from kapell.decorators.futures import FutureEntry, is_future
from kapell.decorators.markers import PerWorker, Replicate

__all__ = ["ArgumentLayout", "PlannedArgument", "Slot", "batches_in", "common_columns"]


@dataclass(frozen=True)
class PlannedArgument:
    """One argument of the call, over all running ranks."""

    name: str | None
    """Keyword, or None for a positional argument."""
    position: int | None
    """Position, or None for a keyword argument."""
    values: Sequence[Any]
    """The distinct values; each is shipped once. May be lazy: a shard is cut each time it is asked for, so ask once."""
    index: Sequence[int]
    """For each running rank, which of `values` it receives."""
    label: str = ""
    """What messages and tables call it: the parameter's name where the signature is known."""


class Slot(NamedTuple):
    """Where an argument stands in the call."""

    name: str | None
    """Keyword, or None for a positional argument."""
    position: int | None
    """Position, or None for a keyword argument."""
    label: str
    """What messages call it."""

    def planned(self, values: Sequence[Any], index: Sequence[int]) -> PlannedArgument:
        """The argument with these values."""
        return PlannedArgument(self.name, self.position, values, index, self.label)


@dataclass(frozen=True)
class ArgumentLayout:
    """Lays arguments over the ranks of one call."""

    method: str
    """Name in messages."""
    mode: str
    """Name of the dispatch mode."""
    world_size: int
    """Ranks of the group."""
    ranks: tuple[int, ...]
    """The ranks that run."""
    reads: tuple[str, ...]
    """The columns that are sent of a batch; empty for all."""
    to_all: tuple[int, ...] = field(init=False)
    """The index of an argument whose one value goes to every rank that runs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "to_all", (0,) * len(self.ranks))

    def kept(self, value: Any) -> Any:
        """The value with only the columns that are read."""
        return columns.only(value, self.reads) if self.reads else value

    def whole(self, slot: Slot, value: Any) -> PlannedArgument:
        """Every rank receives the value."""
        return slot.planned((self.kept(value),), self.to_all)

    def marked(self, slot: Slot, value: Any) -> PlannedArgument | None:
        """The layout of an argument that says itself where it goes; None for any other."""
        if isinstance(value, Replicate):
            return self.whole(slot, value.value)
        if not isinstance(value, PerWorker):
            return None
        if len(value.values) != self.world_size:
            raise ValueError(
                f"{self.method}: argument {slot.label!r} is PerWorker with {len(value.values)} entries; "
                f"the group has {self.world_size} ranks"
            )
        return self._distinct(slot, value.values)

    def entry_per_rank(self, slot: Slot, value: Any) -> PlannedArgument:
        """Each rank receives its entry of a list."""
        hint = "wrap it in Replicate(...) to give every rank the whole value"
        if is_future(value):
            entries = [FutureEntry(value, rank, self.world_size) for rank in self.ranks]
            return slot.planned(tuple(entries), self.ranks)
        if not isinstance(value, list | tuple):
            raise TypeError(
                f"{self.method}: {self.mode} takes for argument {slot.label!r} a list with one entry for each of the "
                f"{self.world_size} ranks, got {type(value).__name__}; {hint}"
            )
        if len(value) != self.world_size:
            raise ValueError(
                f"{self.method}: {self.mode} takes one entry a rank: argument {slot.label!r} has {len(value)} entries, "
                f"the group {self.world_size} ranks; {hint}"
            )
        return self._distinct(slot, value)

    def _distinct(self, slot: Slot, entries: Sequence[Any]) -> PlannedArgument:
        """One entry a rank; an object that occurs several times is one value."""
        places: dict[int, int] = {}
        values: list[Any] = []
        index: list[int] = []
        for rank in self.ranks:
            place = places.setdefault(id(entries[rank]), len(values))
            if place == len(values):
                values.append(self.kept(entries[rank]))
            index.append(place)
        return slot.planned(tuple(values), tuple(index))


def batches_in(value: Any, *, per_worker: bool) -> Sequence[Any]:
    """The batches that an argument stands for: itself, what a marker holds, or the entries of a list."""
    if isinstance(value, Replicate):
        return (value.value,)
    if isinstance(value, PerWorker):
        return value.values
    return value if per_worker and isinstance(value, list | tuple) else (value,)


def common_columns(batches: Sequence[Any]) -> Mapping[str, None] | None:
    """Columns that all of an argument's batches have, in order; None for an argument without columns."""
    if len(batches) == 1:
        names = columns.columns_of(batches[0])
        return None if names is None else dict.fromkeys(names)
    found = [names for names in map(columns.columns_of, batches) if names is not None]
    if not found:
        return None
    shared = set(found[0]).intersection(*found)
    return {name: None for name in found[0] if name in shared}
