"""Which rows go to which shard, and the shards themselves, cut only when they are asked for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, repeat
from typing import Any, overload

from kapell.decorators.splitter import Splitter

__all__ = ["RowLayout", "Shards", "part_of"]


@dataclass(frozen=True)
class RowLayout:
    """The rows of every shard: a range each, or a part of `order` each. Costs memory per shard, not per row.

    >>> layout = RowLayout.even(10, 3)
    >>> layout.sizes, layout.positions(1)
    ((4, 3, 3), range(4, 7))
    """

    sizes: tuple[int, ...]
    """Rows of each shard, padding not counted."""
    order: Sequence[int] | None = None
    """The caller's rows, shard after shard; None when they keep their order."""
    padded_size: int | None = None
    """Rows of each shard with padding; None without padding."""
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", tuple(accumulate(self.sizes, initial=0)))

    @staticmethod
    @lru_cache(maxsize=32)
    def even(num_rows: int, count: int) -> "RowLayout":
        """Shards that differ by at most one row, the larger ones first."""
        size, larger = divmod(num_rows, count)
        return RowLayout((size + 1,) * larger + (size,) * (count - larger))

    @property
    def num_rows(self) -> int:
        """Rows of all shards, padding not counted."""
        return self._starts[-1]

    @property
    def padding(self) -> tuple[int, ...]:
        """Padding rows at the end of each shard."""
        if self.padded_size is None:
            return (0,) * len(self.sizes)
        return tuple(self.padded_size - size for size in self.sizes)

    def span(self, shard: int) -> tuple[int, int]:
        """First and last-plus-one position of a shard, in the order of dispatch."""
        return self._starts[shard], self._starts[shard + 1]

    def positions(self, shard: int) -> Sequence[int]:
        """The caller's rows of a shard, padding not counted."""
        start, stop = self.span(shard)
        return range(start, stop) if self.order is None else self.order[start:stop]


@dataclass(frozen=True)
class Shards(Sequence[Any]):
    """The parts of one value, each cut when it is asked for."""

    value: Any
    """The caller's value, which must not change before the last shard is cut."""
    splitter: Splitter
    """How to cut it; one with `take`."""
    layout: RowLayout
    """Where to cut it."""

    def __len__(self) -> int:
        return len(self.layout.sizes)

    @overload
    def __getitem__(self, shard: int) -> Any: ...
    @overload
    def __getitem__(self, shard: slice) -> list[Any]: ...
    def __getitem__(self, shard: int | slice) -> Any:
        """One shard, or a list of several."""
        if isinstance(shard, slice):
            return [self[index] for index in range(*shard.indices(len(self)))]
        if not -len(self) <= shard < len(self):
            raise IndexError(f"shard {shard} of {len(self)}")
        shard %= len(self)
        padding = self.layout.padded_size - self.layout.sizes[shard] if self.layout.padded_size is not None else 0
        if self.layout.order is None and not padding:
            return self._range(*self.layout.span(shard))
        return self._take(self.layout.positions(shard), padding)

    def __iter__(self) -> Iterator[Any]:
        layout, cut, split = self.layout, self.splitter.cut, self.splitter.split
        as_they_are = layout.order is None and layout.padded_size is None
        if split is not None and as_they_are:
            return iter(split(self.value, layout._starts))
        if cut is not None and as_they_are:
            return map(cut, repeat(self.value), layout._starts, layout._starts[1:])
        return (self[index] for index in range(len(self)))

    def _range(self, start: int, stop: int) -> Any:
        if self.splitter.cut is not None:
            return self.splitter.cut(self.value, start, stop)
        return self._take(range(start, stop), 0)

    def _take(self, positions: Sequence[int], padding: int) -> Any:
        take, pad = self.splitter.take, self.splitter.pad
        assert take is not None, "a type that offers chunk only is cut by itself"
        if not padding:
            return take(self.value, positions)
        if pad is None:  # the method is told by its padding_argument
            filler = positions[-1] if len(positions) else self.layout.num_rows - 1
            return take(self.value, [*positions, *[filler] * padding])
        if len(positions):
            return pad(take(self.value, positions), padding)
        filled = pad(take(self.value, [self.layout.num_rows - 1]), padding)
        return take(filled, range(1, padding + 1))


def part_of(value: Any, splitter: Splitter, index: int, count: int) -> Any:
    """One of `count` parts of a value, whose sizes differ by at most one row."""
    if splitter.take is None:
        assert splitter.chunk is not None
        return splitter.chunk(value, count)[index]
    return Shards(value, splitter, RowLayout.even(splitter.length(value), count))[index]
