"""What a batch does with its rows: pick, cut, join, repeat, reorder, pad."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, pairwise, repeat
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict

from kapell.protocol.columns import cut, join, split, take
from kapell.protocol.config import DataProtoConfig
from kapell.protocol.container import BatchContainer
from kapell.protocol.indexing import RowIndex, balanced_bounds, row_numbers
from kapell.protocol.iteration import mini_batches
from kapell.protocol.meta import MetaPolicy, merge_meta
from kapell.protocol.tensor_columns import TensorColumns

__all__ = ["RowOperations"]


class RowOperations(BatchContainer):
    """Row operations. Results are new batches.

    Those of `slice`, `chunk`, `split` and `split_at` share memory with their source, as does a `concat` of one batch.
    """

    def select_idxs(self, idxs: RowIndex) -> Self:
        """Copy rows by a mask or by row numbers (negative ones count from the end, repeats allowed)."""
        rows = row_numbers(idxs, len(self))
        return self._map(lambda column: take(column, rows), len(rows))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Give rows ``start`` to ``end``; shares memory unless ``step`` skips rows."""
        first, last, stride = slice(start, end, step).indices(len(self))
        if stride != 1:
            return self.select_idxs(range(first, last, stride))
        return self._cut(first, max(first, last))

    def chunk(self, chunks: int) -> list[Self]:
        """Cut into exactly ``chunks`` pieces whose sizes differ by at most one; 10 rows in 3 are 4, 3, 3.

        With fewer rows than pieces the last pieces are empty. All columns are cut at the same rows.
        """
        if chunks < 1:
            raise ValueError(f"cannot cut {len(self)} rows into {chunks} pieces; ask for at least 1")
        bounds = balanced_bounds(len(self), chunks)
        return [self._cut(start, stop) for start, stop in pairwise(bounds)]

    def split(self, split_size: int) -> list[Self]:
        """Cut into pieces of ``split_size`` rows; the last one has what remains."""
        if split_size < 1:
            raise ValueError(f"cannot split {len(self)} rows into pieces of {split_size}; a piece has at least 1 row")
        starts = range(0, max(len(self), 1), split_size)
        return [self._cut(start, min(start + split_size, len(self))) for start in starts]

    def split_at(self, bounds: Sequence[int]) -> list[Self]:
        """Cut at all ``bounds`` (row numbers, not falling) at once: for many pieces much faster than `slice` for each.

        The first bound is where the first piece begins, the last where the last one ends. Pieces share tensor memory
        with this batch without autograd's knowledge: to be sent or read, not to be written to inside a graph.

        >>> from kapell.protocol import DataProto
        >>> batch = DataProto.from_dict(non_tensors={"n": [0, 1, 2]})
        >>> [piece.non_tensor_batch["n"].tolist() for piece in batch.split_at([0, 2, 3])]
        [[0, 1], [2]]
        """
        bounds = list(bounds)
        if bounds != sorted(bounds) or (bounds and not 0 <= bounds[0] <= bounds[-1] <= len(self)):
            raise ValueError(f"cannot cut {len(self)} rows at {bounds}; the bounds rise from 0 to the number of rows")
        self.check_consistency()
        tensors = {name: split(column, bounds) for name, column in self._entries().items()}
        arrays = {name: split(column, bounds) for name, column in self.non_tensor_batch.items()}
        by_piece = zip(_by_piece(tensors), _by_piece(arrays), pairwise(bounds), strict=False)
        if type(self).__init__ is BatchContainer.__init__:
            row_bytes = TensorColumns(self._entries(), len(self), None).weigh_rows()
            pieces = [self._made(columns, others, end - start, row_bytes) for columns, others, (start, end) in by_piece]
        else:
            pieces = [self._rows_of(columns, others, end - start) for columns, others, (start, end) in by_piece]
        if self._padded is not None:
            for piece, padded in zip(pieces, split(self._padded, bounds), strict=True):
                piece._padded = padded
        return pieces

    @staticmethod
    def concat(data: Sequence[Any], policies: Mapping[str, MetaPolicy | str] | None = None) -> Any:
        """Join batches row after row.

        Parts without rows or columns add only their ``meta_info``, which is merged as `merge_meta` says: metrics of all
        parts are kept, other keys follow ``policies``, what `register_meta_policy` declared, or must agree. With a
        `StoredBatch` among them the result is one. Where one part has all the rows there is nothing to join: the result
        may share its memory.
        """
        if not data:
            raise ValueError("there is nothing to concatenate: got no batches")
        for part in data:
            if hasattr(part, "union_onto"):
                return part.concat(data, policies)
            if not isinstance(part, BatchContainer):
                raise TypeError(f"cannot concatenate a {type(part).__name__} with batches; get() futures first")
        parts = [part for part in data if len(part) or part.columns] or list(data[:1])
        first, rows = parts[0], sum(map(len, parts))
        tables = [part._entries() for part in parts]
        _require_same_columns(parts, tables)
        tensors = {name: join([table[name] for table in tables], name) for name in tables[0]}
        arrays = {name: join([part.non_tensor_batch[name] for part in parts], name) for name in first.non_tensor_batch}
        joined = first._rows_of(tensors, arrays, rows)
        if len({part._device for part in parts}) > 1:
            joined.batch = TensorDict(tensors, [rows])
        joined.meta_info = merge_meta([part.meta_info for part in data], policies)
        if any(part._padded is not None for part in parts):
            joined._padded = np.concatenate([part.padding_mask.numpy() for part in parts])
        return joined

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Repeat every row: ``a a b b`` when interleaved (n answers after each prompt), else ``a b a b``."""
        if repeat_times < 1:
            raise ValueError(f"cannot repeat rows {repeat_times} times; repeat_times is at least 1")
        rows = np.arange(len(self))
        return self.select_idxs(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | torch.Tensor) -> Self:
        """Repeat row i ``repeat_times[i]`` times, in place; 0 leaves it out."""
        times = np.asarray(repeat_times.cpu() if isinstance(repeat_times, torch.Tensor) else repeat_times)
        if times.shape != (len(self),):
            raise ValueError(f"repeat_times has shape {times.shape} but the batch has {len(self)} rows")
        if times.size and (times.dtype.kind not in "iu" or times.min() < 0):
            raise ValueError("repeat_times holds whole numbers that are not negative")
        return self.select_idxs(np.repeat(np.arange(len(self)), times.astype(np.int64)))

    def reorder(self, indices: RowIndex) -> None:
        """Put the rows into the given order. Changes this batch."""
        self._become(self.select_idxs(indices))

    def is_padding_enabled(self) -> bool:
        """Say whether dispatch may pad this batch."""
        return bool(self.meta_info.get(DataProtoConfig.auto_padding_key, False)) or DataProtoConfig.auto_padding

    def padding(self, padding_size: int, padding_candidate: str = "last") -> None:
        """Append copies of the ``"first"`` or ``"last"`` row and mark them in `padding_mask`. Changes this batch."""
        if padding_candidate not in ("first", "last", ""):
            raise ValueError(f"padding_candidate is 'first' or 'last', got {padding_candidate!r}")
        source = 0 if padding_candidate == "first" else len(self) - 1
        self._become(self._padded_with(np.full(padding_size, source) if padding_size > 0 else _no_rows(padding_size)))

    def without_padding(self) -> Self:
        """Leave out the rows that padding added."""
        return self.select_idxs(~self.padding_mask)

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Walk the batch in mini-batches; see `mini_batches` for ``dataloader_kwargs``. A seed makes it repeatable."""
        order = mini_batches(len(self), mini_batch_size, epochs, seed=seed, **(dataloader_kwargs or {}))
        return (self.select_idxs(rows) for rows in order)

    def _cut(self, start: int, stop: int) -> Self:
        return self._map(lambda column: cut(column, start, stop), stop - start)

    def _padded_with(self, source_rows: np.ndarray) -> Self:
        """Append copies of rows as padding."""
        if len(source_rows) and not len(self):
            raise ValueError(f"cannot add {len(source_rows)} padding rows to a batch without rows to copy")
        padded = self.select_idxs(np.concatenate([np.arange(len(self)), source_rows]))
        if len(source_rows):
            mask = np.ones(len(padded), dtype=bool)
            mask[: len(self)] = self.padding_mask.numpy()
            padded._padded = mask
        return padded

    def _become(self, other: Self) -> None:
        self._tensors, self.non_tensor_batch, self._padded = other._tensors, other.non_tensor_batch, other._padded


def _no_rows(padding_size: int) -> np.ndarray:
    if padding_size < 0:
        raise ValueError(f"cannot add {padding_size} padding rows")
    return np.empty(0, dtype=np.int64)


def _by_piece(columns: dict[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """For each piece its columns, from the pieces of each column; without end where there are no columns."""
    if not columns:
        return ({} for _ in count())
    # In C all through: there are thousands of pieces.
    return map(dict, map(zip, repeat(tuple(columns)), zip(*columns.values(), strict=True)))


def _require_same_columns(parts: Sequence[BatchContainer], tables: Sequence[dict[str, Any]]) -> None:
    first, first_table = parts[0], tables[0]
    in_one_order = len(set(map(tuple, tables))) == len({tuple(part.non_tensor_batch) for part in parts}) == 1
    if in_one_order and first_table:
        return
    for number, (part, table) in enumerate(zip(parts, tables, strict=True)):
        if table.keys() == first_table.keys() and part.non_tensor_batch.keys() == first.non_tensor_batch.keys():
            if (part._tensors is None) != (first._tensors is None):
                raise ValueError(f"cannot concatenate: part {number} and part 0 differ in having tensor columns")
            continue
        expected = set(first.columns)
        if difference := sorted(expected ^ set(part.columns)):
            has, lacks = (0, number) if difference[0] in expected else (number, 0)
            raise ValueError(f"cannot concatenate: part {has} has column {difference[0]!r}, part {lacks} has not")
        moved = sorted(set(table) ^ set(first_table))[0]
        raise ValueError(f"cannot concatenate: column {moved!r} is a tensor in only one of part {number} and part 0")
