"""Columns that lie in a store: in which values, and how some rows of some columns are fetched from there."""

# B rows

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from kapell.protocol.columns import cut, join, num_rows, take
from kapell.protocol.naming import only
from kapell.protocol.store import Store, reference_key

__all__ = ["ColumnFacts", "RowPicks", "StoredColumn", "StoredPart", "fetch_columns", "is_range", "put_columns"]

_APART_BYTES = 1 << 20  # smaller columns of a batch share one value: each value costs a request of its own


class ColumnFacts(NamedTuple):
    """What is known of a column without having it."""

    dtype: str
    """Of its numbers; ``object`` for Python objects."""
    shape: tuple[int | None, ...]
    """Sizes, rows first; None for a size that differs from row to row."""
    is_tensor: bool
    """Whether it is a tensor, and no numpy array."""

    @classmethod
    def of(cls, column: Any) -> ColumnFacts:
        """Those of a column that is here."""
        dtype = str(getattr(column, "dtype", None) or type(column).__name__).removeprefix("torch.")
        jagged = getattr(column, "is_nested", False)
        inner = (None,) * (column.dim() - 1) if jagged else tuple(map(int, column.shape[1:]))
        return cls(dtype, (num_rows(column), *inner), not isinstance(column, np.ndarray))


class StoredPart(NamedTuple):
    """Where one producer's rows of a column are."""

    store: Store
    """The store."""
    ref: Any
    """A reference to a batch there."""
    name: str
    """The column's name in that batch."""
    num_rows: int
    """Rows of that batch."""


class StoredColumn:
    """A column in a store, as one selection of its rows has it: row numbers count through all parts."""

    def __init__(self, parts: tuple[StoredPart, ...], facts: ColumnFacts) -> None:
        self.parts = parts
        """Where it is, row after row."""
        self.facts = facts
        """Its kind. The rows that it counts are those of one part."""
        self.fetched: Any = None
        """The selected rows, when they were fetched."""

    @property
    def num_rows(self) -> int:
        """Rows of all parts."""
        return sum(part.num_rows for part in self.parts)

    def unselected(self) -> StoredColumn:
        """The same column for another selection of rows."""
        return StoredColumn(self.parts, self.facts)

    def is_same_as(self, other: StoredColumn | None) -> bool:
        """Whether the other is in the same place."""
        return other is not None and self.parts == other.parts

    def placeholder(self, rows: np.ndarray) -> Any:
        """Row numbers as a column of the same kind."""
        return torch.from_numpy(rows) if self.facts.is_tensor else rows

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredColumn, (self.parts, self.facts)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredColumn:
        return self.unselected()  # what lies in the store is nobody's to change


def put_columns(batch: Any, store: Store) -> dict[str, StoredColumn]:
    """Put the columns of a batch into a store: large ones apart, the others together."""
    sizes = batch.column_bytes()
    apart = [[name] for name, size in sizes.items() if size >= _APART_BYTES]
    together = [name for name, size in sizes.items() if size < _APART_BYTES]
    stored = {}
    for names in [*apart, together] if together else apart:
        ref = store.put(only(batch, names, meta=False))
        for name in names:
            part = StoredPart(store, ref, name, len(batch))
            stored[name] = StoredColumn((part,), ColumnFacts.of(batch.column(name)))
    return {name: stored[name] for name in sizes}


class RowPick(NamedTuple):
    """Which rows of which parts of a column make up the rows that are wanted."""

    by_part: Mapping[int, np.ndarray]
    """Row numbers inside each part that has any."""
    order: np.ndarray | None
    """How these rows, joined part after part, are ordered in the end; None where they are as they come."""

    @classmethod
    def of(cls, sizes: Sequence[int], rows: np.ndarray) -> RowPick:
        """For rows that are counted through parts of these sizes."""
        if not len(rows) or len(sizes) == 1:
            return cls({0: rows}, None)  # without rows one part remains, to tell which kind of column it is
        starts = [0, *accumulate(sizes)]
        part_of_row = np.searchsorted(starts, rows, side="right") - 1
        places = {part: np.flatnonzero(part_of_row == part) for part in np.unique(part_of_row).tolist()}
        joined = np.concatenate(list(places.values()))
        return cls(
            {part: rows[where] - starts[part] for part, where in places.items()},
            None if (joined[1:] > joined[:-1]).all() else np.argsort(joined),
        )

    def numbers(self, sizes: Sequence[int]) -> np.ndarray:
        """The rows, counted through the parts that have any."""
        begins = accumulate((sizes[part] for part in self.by_part), initial=0)
        joined = np.concatenate([rows + begin for rows, begin in zip(self.by_part.values(), begins, strict=False)])
        return joined if self.order is None else joined[self.order]


class RowPicks:
    """The picks of several columns, most of which are one and the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], RowPick] = {}

    def of(self, column: StoredColumn, rows: np.ndarray) -> RowPick:
        """That of one column."""
        sizes = tuple(part.num_rows for part in column.parts)
        key = sizes, rows.tobytes()
        if key not in self._known:
            self._known[key] = RowPick.of(sizes, rows)
        return self._known[key]


def fetch_columns(wanted: Sequence[tuple[StoredColumn, np.ndarray]], timeout: float | None) -> list[Any]:
    """Fetch rows of columns, each batch in a store once. Gives copies; raises as `Store.get`."""
    known = RowPicks()
    picks = [known.of(column, rows) for column, rows in wanted]
    needed = [column.parts[index] for (column, _), pick in zip(wanted, picks, strict=True) for index in pick.by_part]
    batches = _fetched(needed, timeout)
    fetched = []
    for (column, _), (by_part, order) in zip(wanted, picks, strict=True):
        # What is cut out is a view: of one part alone rows are taken, which copies them.
        rows_of = take if len(by_part) == 1 else _cut_or_take
        parts = [(column.parts[index], local) for index, local in by_part.items()]
        pieces = [rows_of(batches[reference_key(part.ref)].column(part.name), local) for part, local in parts]
        joined = pieces[0] if len(pieces) == 1 else join(pieces, parts[0][0].name)
        fetched.append(joined if order is None else take(joined, order))
    return fetched


def is_range(rows: np.ndarray) -> bool:
    """Whether rows follow each other without a gap."""
    return bool(len(rows)) and rows[-1] - rows[0] == len(rows) - 1 and bool((rows[1:] > rows[:-1]).all())


def _cut_or_take(column: Any, rows: np.ndarray) -> Any:
    return cut(column, int(rows[0]), int(rows[-1]) + 1) if is_range(rows) else take(column, rows)


def _fetched(parts: Sequence[StoredPart], timeout: float | None) -> dict[Any, Any]:
    """The batches by the keys of their references, from each store in one request."""
    by_store: list[tuple[Store, dict[Any, Any]]] = []
    for part in parts:
        refs = next((refs for store, refs in by_store if store is part.store or store == part.store), None)
        if refs is None:
            refs = {}
            by_store.append((part.store, refs))
        refs[reference_key(part.ref)] = part.ref
    batches: dict[Any, Any] = {}
    for store, refs in by_store:
        batches |= zip(refs, store.get(list(refs.values()), timeout=timeout), strict=True)
    return batches
