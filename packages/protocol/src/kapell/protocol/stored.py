"""`StoredBatch`: a batch whose columns stay where they were made; what is done to it here is bookkeeping."""

# B rows

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict

from kapell.protocol.columns import same
from kapell.protocol.container import BatchContainer
from kapell.protocol.dataproto import DataProto
from kapell.protocol.future import DataProtoFuture
from kapell.protocol.indexing import RowIndex
from kapell.protocol.meta import MetaPolicy
from kapell.protocol.naming import only
from kapell.protocol.store import Store, reference_key
from kapell.protocol.stored_columns import (
    ColumnFacts,
    RowPicks,
    StoredColumn,
    fetch_columns,
    is_range,
    put_columns,
)
from kapell.protocol.wire import pack, unpack

__all__ = ["StoredBatch"]


class StoredBatch(DataProtoFuture):
    """A batch by reference: columns in a store, known by name, shape and dtype, beside columns that are here.

    The operations of `DataProto` that pick, cut, join, repeat, reorder, pad, select, rename or unite give the same
    rows and columns, and move none: the batch notes which rows of which stored batches it has. A worker that is given
    one fetches its rows of the columns that it reads.

    `column` fetches one column to here, once for all batches with these rows; `get` fetches a `DataProto`. What is
    fetched is a copy: changed values go on when they are united with the batch, under a name of their own or after
    ``pop``.

    >>> from kapell.protocol import MemoryStore
    >>> batch = DataProto.from_dict({"ids": torch.arange(4)}, {"text": ["a", "b", "c", "d"]})
    >>> part = StoredBatch.put(batch, MemoryStore()).select_idxs([3, 0])
    >>> part = part.union(DataProto.from_dict({"score": torch.ones(2)}))
    >>> print(part)
    StoredBatch: 2 rows
      ids    int64    (2,)  stored
      score  float32  (2,)  here
      text   object   (2,)  stored
    >>> part.get(columns=["text"]).non_tensor_batch["text"].tolist()
    ['d', 'a']
    """

    def __init__(self, table: DataProto, stored: Mapping[str, StoredColumn]) -> None:
        # A column of row numbers stands for each stored one: what is done to this table is done to all columns.
        self._table = table
        self._stored = dict(stored)

    @classmethod
    def put(cls, batch: DataProto, store: Store) -> Self:
        """Put the columns of a batch into a store."""
        stored = put_columns(batch, store)
        rows = np.arange(len(batch))
        return cls(_replaced(batch, {name: column.placeholder(rows) for name, column in stored.items()}), stored)

    @classmethod
    def here(cls, batch: DataProto) -> Self:
        """Give the batch itself as one that has all its columns here."""
        return cls(batch.select(), {})

    @staticmethod
    def concat(data: Sequence[Any], policies: Mapping[str, MetaPolicy | str] | None = None) -> Any:
        """Join batches row after row, as `DataProto.concat` does; a column is stored in all of them or in none."""
        tables = []
        stored: dict[str, StoredColumn] = {}
        first: StoredBatch | None = None
        for batch in map(_as_stored, data):
            if batch.columns:
                first = batch if first is None else first
                _require_same_places(first, batch)
            begins = {name: column.num_rows for name, column in stored.items()}
            rows = {name: batch._table.column(name) + begins.get(name, 0) for name in batch._stored}
            tables.append(_replaced(batch._table, rows))
            for name, column in batch._stored.items():
                before = stored[name].parts if name in stored else ()
                stored[name] = StoredColumn((*before, *column.parts), column.facts)
        return StoredBatch(DataProto.concat(tables, policies), stored)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns, tensors first."""
        return self._table.columns

    @property
    def column_facts(self) -> dict[str, ColumnFacts]:
        """Dtype and shape of each column."""
        facts = {}
        for name in self.columns:
            known = self._stored.get(name)
            column = ColumnFacts.of(self._table.column(name)) if known is None else known.facts
            facts[name] = column._replace(shape=(len(self), *column.shape[1:]))
        return facts

    @property
    def stored_columns(self) -> tuple[str, ...]:
        """Names of the columns that are not here."""
        return tuple(self._stored)

    @property
    def meta_info(self) -> dict[str, Any]:
        """What holds for the whole batch; it is here."""
        return self._table.meta_info

    @property
    def batch(self) -> Mapping[str, Any]:
        """The tensor columns; reading one fetches it."""
        return _Fetching(self, tuple(self._table.tensor_columns()))

    @property
    def non_tensor_batch(self) -> Mapping[str, Any]:
        """The other columns; reading one fetches it."""
        return _Fetching(self, tuple(self._table.non_tensor_batch))

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Bytes that travel with it beside references: columns that are here, and row numbers that are no range."""
        rows = map(self._rows, self._stored)
        numbers = {numbers.tobytes() for numbers in rows if not is_range(numbers)}
        return self._table.nbytes - 8 * len(self) * len(self._stored) + sum(map(len, numbers))

    @property
    def futures(self) -> tuple[Any, ...]:
        """References to all stored batches of which it has columns."""
        refs = [part.ref for column in self._stored.values() for part in column.parts]
        return tuple({reference_key(ref): ref for ref in refs}.values())

    def done(self) -> bool:
        """True: what is stored is there."""
        return True

    def column(self, name: str) -> Any:
        """Give one column, tensor or numpy array; a stored one is fetched, once."""
        column = self._stored.get(name)
        if column is None:
            return self._table.column(name)
        if column.fetched is None:
            (column.fetched,) = fetch_columns([(column, self._rows(name))], None)
        return column.fetched

    def get(self, timeout: float | None = None, *, columns: Sequence[str] | None = None) -> Any:
        """Fetch a `DataProto` with all columns or those named; those that are here share memory with this batch."""
        chosen = self if columns is None else only(self, columns)
        names = list(chosen._stored)
        fetched = fetch_columns([(chosen._stored[name], chosen._rows(name)) for name in names], timeout)
        return _replaced(chosen._table, dict(zip(names, fetched, strict=True)))

    # Rows: the table does to its rows what is asked for.

    def __getitem__(self, item: int | RowIndex) -> Any:
        """Give rows as a batch, or one row as a `DataProtoItem`, which is fetched."""
        if isinstance(item, int | np.integer) and not isinstance(item, bool):
            return self.select_idxs([int(item)]).get()[0]
        return self._moved(self._table[item])

    def select_idxs(self, idxs: RowIndex) -> Self:
        """Pick rows by a mask or by row numbers."""
        return self._moved(self._table.select_idxs(idxs))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Give rows ``start`` to ``end``."""
        return self._moved(self._table.slice(start, end, step))

    def chunk(self, chunks: int) -> list[Any]:
        """Cut into exactly ``chunks`` pieces whose sizes differ by at most one."""
        return list(map(self._moved, self._table.chunk(chunks)))

    def split(self, split_size: int) -> list[Self]:
        """Cut into pieces of ``split_size`` rows; the last one has what remains."""
        return list(map(self._moved, self._table.split(split_size)))

    def split_at(self, bounds: Sequence[int]) -> list[Self]:
        """Cut at all ``bounds`` at once."""
        return list(map(self._moved, self._table.split_at(bounds)))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Repeat every row: ``a a b b`` when interleaved, else ``a b a b``."""
        return self._moved(self._table.repeat(repeat_times, interleave))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | torch.Tensor) -> Self:
        """Repeat row i ``repeat_times[i]`` times, in place; 0 leaves it out."""
        return self._moved(self._table.sample_level_repeat(repeat_times))

    def reorder(self, indices: RowIndex) -> None:
        """Put the rows into the given order. Changes this batch."""
        self._become(self.select_idxs(indices))

    def padding(self, padding_size: int, padding_candidate: str = "last") -> None:
        """Append copies of the ``"first"`` or ``"last"`` row and mark them in `padding_mask`. Changes this batch."""
        table = self._table.select()
        table.padding(padding_size, padding_candidate)
        self._become(self._moved(table))

    def without_padding(self) -> Self:
        """Leave out the rows that padding added."""
        return self._moved(self._table.without_padding())

    @property
    def padding_mask(self) -> torch.Tensor:
        """Boolean (B,): True where a row was added by padding."""
        return self._table.padding_mask

    def is_padding_enabled(self) -> bool:
        """Say whether dispatch may pad this batch."""
        return self._table.is_padding_enabled()

    # Columns

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> Self:
        """Keep the named columns and ``meta_info`` keys; None keeps all of that part."""
        return self._with(self._table.select(batch_keys, non_tensor_batch_keys, meta_info_keys))

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> Self:
        """Take the named columns and ``meta_info`` keys out of this batch, which changes it, or change nothing."""
        popped = self._with(self._table.pop(batch_keys, non_tensor_batch_keys, meta_info_keys))
        self._become(self._with(self._table))
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Give columns other names."""
        old, new = ([keys] if isinstance(keys, str) else list(keys) for keys in (old_keys, new_keys))
        renamed = self._table.rename(old, new)
        names = dict(zip(old, new, strict=True))
        return type(self)(renamed, {names.get(name, name): column for name, column in self._stored.items()})

    def union(self, other: BatchContainer | StoredBatch) -> Self:
        """Give a batch with the columns and ``meta_info`` of both; what both have must be the same.

        Where one of them has it stored, it is fetched and compared, unless both refer to the same rows of it.
        """
        right = _as_stored(other)
        new = []
        for name in right.columns:
            if name not in self.columns or not (name in self._stored or name in right._stored):
                new.append(name)
            elif not self._refers_alike(right, name) and not same(self._as_kept(name), right._as_kept(name)):
                raise ValueError(f"both batches have column {name!r}, with different values; rename or pop one first")
        right = only(right, new)
        table = _without_device(self._table) if right._stored else self._table
        return type(self)(table.union(right._table), {**right._stored, **self._stored})

    def union_onto(self, batch: DataProto) -> Self:
        """Give ``batch.union(self)``."""
        return type(self).here(batch).union(self)

    def __or__(self, other: object) -> Self:
        return self.union(other) if isinstance(other, BatchContainer | StoredBatch) else NotImplemented

    def __repr__(self) -> str:
        lines = [
            [name, facts.dtype, str(facts.shape).replace("None", "*"), "stored" if name in self._stored else "here"]
            for name, facts in self.column_facts.items()
        ]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        rows = ["  " + "  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([f"{type(self).__name__}: {len(self)} rows", *rows])

    def __reduce__(self) -> tuple[Any, ...]:
        known = RowPicks()
        rows: list[np.ndarray | range] = []
        places: dict[int, int] = {}
        stored = {}
        for name, column in self._stored.items():
            pick = known.of(column, self._rows(name))
            if id(pick) not in places:
                numbers = pick.numbers([part.num_rows for part in column.parts])
                places[id(pick)] = len(rows)
                rows.append(range(int(numbers[0]), int(numbers[-1]) + 1) if is_range(numbers) else numbers)
            parts = tuple(map(column.parts.__getitem__, pick.by_part))
            stored[name] = StoredColumn(parts, column.facts), places[id(pick)]
        here = only(self._table, [name for name in self.columns if name not in stored])
        return _arrived, (type(self), here, pack(rows), stored)

    def _as_kept(self, name: str) -> Any:
        """One column as it lies in the store: what `column` gave may have been written to since."""
        return self.get(columns=[name]).column(name)

    def _rows(self, name: str) -> np.ndarray:
        return np.asarray(self._table.column(name))

    def _with(self, table: DataProto) -> Self:
        """The batch of a table of these rows, with all or some of the columns."""
        kept = set(table.columns)
        return type(self)(table, {name: column for name, column in self._stored.items() if name in kept})

    def _moved(self, table: DataProto) -> Self:
        """The batch of a table of other rows."""
        return type(self)(table, {name: column.unselected() for name, column in self._stored.items()})

    def _become(self, other: Self) -> None:
        self._table, self._stored = other._table, other._stored

    def _refers_alike(self, other: StoredBatch, name: str) -> bool:
        mine, theirs = self._stored.get(name), other._stored.get(name)
        return mine is not None and mine.is_same_as(theirs) and np.array_equal(self._rows(name), other._rows(name))


class _Fetching(Mapping[str, Any]):
    """Some columns of a batch by name."""

    def __init__(self, batch: StoredBatch, names: Sequence[str]) -> None:
        self._batch = batch
        self._names = names

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(f"no column {name!r}; there are {list(self._names)}")
        return self._batch.column(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


def _as_stored(batch: Any) -> StoredBatch:
    return batch if isinstance(batch, StoredBatch) else StoredBatch.here(batch)


def _require_same_places(first: StoredBatch, other: StoredBatch) -> None:
    for name in sorted(first._stored.keys() ^ other._stored.keys()):
        if name in first.columns and name in other.columns:
            raise ValueError(
                f"cannot concatenate: column {name!r} is stored in one batch and here in another; get() the first"
            )


def _replaced(batch: DataProto, columns: Mapping[str, Any]) -> DataProto:
    """The batch with other columns in place of its own, wherever they are."""
    batch = _without_device(batch) if columns else batch
    tensors = {name: columns.get(name, column) for name, column in batch.tensor_columns().items()}
    arrays = {name: columns.get(name, column) for name, column in batch.non_tensor_batch.items()}
    replaced = batch._rows_of(tensors, arrays, len(batch))
    replaced._padded = batch._padded
    return replaced


def _without_device(batch: DataProto) -> DataProto:
    """The batch without a device for all of its columns, to which row numbers would be moved."""
    if batch._device is None:
        return batch
    bare = batch.select()
    bare.batch = TensorDict(batch.tensor_columns(), [len(batch)])
    return bare


def _arrived(
    kind: type[StoredBatch], here: DataProto, packed: Any, stored: Mapping[str, tuple[StoredColumn, int]]
) -> StoredBatch:
    rows = [np.asarray(numbers, dtype=np.int64) for numbers in unpack(packed)]
    columns = {name: column.placeholder(rows[place]) for name, (column, place) in stored.items()}
    table = here.union(DataProto.from_single_dict(columns)) if columns else here
    table._padded = here._padded
    return kind(table, {name: column for name, (column, _) in stored.items()})
