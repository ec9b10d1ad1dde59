"""What else a TensorDict may hold: values of one row each, values of all rows, and further TensorDicts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_tensor_collection

from kapell.protocol.columns.equality import same
from kapell.protocol.columns.numbers import weight_of
from kapell.protocol.columns.objects import column_of_objects
from kapell.protocol.columns.registry import ColumnKind, cell, cut, join, num_bytes, require_one, take
from kapell.protocol.columns.value_stack import ValueStack, array_of

__all__ = ["ENTRIES"]


class _Values:
    """One value a row inside a TensorDict."""

    name = "non-tensor stack"

    def accepts(self, column: Any) -> bool:
        return isinstance(column, NonTensorStack)

    def num_rows(self, column: NonTensorStack) -> int:
        return column.batch_size[0]

    def take(self, column: NonTensorStack, rows: np.ndarray) -> ValueStack:
        return ValueStack.of(array_of(column)[rows], device=column.device)

    def cut(self, column: NonTensorStack, start: int, stop: int) -> ValueStack:
        return ValueStack.of(array_of(column)[start:stop], device=column.device)

    def split(self, column: NonTensorStack, bounds: Sequence[int]) -> Sequence[Any]:
        return [self.cut(column, start, stop) for start, stop in pairwise(bounds)]

    def join(self, columns: Sequence[NonTensorStack | NonTensorData]) -> ValueStack:
        arrays = [_array_of_entry(column) for column in columns]
        if len({array.dtype for array in arrays}) > 1:
            arrays = [column_of_objects(array) for array in arrays]
        return ValueStack.of(np.concatenate(arrays), device=columns[0].device)

    def cell(self, column: NonTensorStack, row: int) -> Any:
        return NonTensorData(array_of(column)[row])

    def num_bytes(self, column: NonTensorStack) -> int:
        return num_bytes(array_of(column))


class _Shared:
    """One value for all rows inside a TensorDict: row operations leave it alone; joined with another, it turns into
    one value a row.
    """

    name = "shared value"

    def accepts(self, column: Any) -> bool:
        return isinstance(column, NonTensorData)

    def num_rows(self, column: NonTensorData) -> int:
        return column.batch_size[0]

    def take(self, column: NonTensorData, rows: np.ndarray) -> NonTensorData:
        return NonTensorData(column.data, batch_size=[len(rows)])

    def cut(self, column: NonTensorData, start: int, stop: int) -> NonTensorData:
        return NonTensorData(column.data, batch_size=[stop - start])

    def split(self, column: NonTensorData, bounds: Sequence[int]) -> Sequence[Any]:
        return [self.cut(column, start, stop) for start, stop in pairwise(bounds)]

    def join(self, columns: Sequence[NonTensorData]) -> NonTensorData | ValueStack:
        if all(same(columns[0].data, column.data) for column in columns[1:]):
            return NonTensorData(columns[0].data, batch_size=[sum(column.batch_size[0] for column in columns)])
        return ValueStack.of(np.concatenate([_array_of_entry(column) for column in columns]))

    def cell(self, column: NonTensorData, row: int) -> Any:
        return NonTensorData(column.data)

    def num_bytes(self, column: NonTensorData) -> int:
        return weight_of(column.data)


class _Table:
    """A TensorDict inside a TensorDict: its columns follow the rows."""

    name = "tensordict"

    def accepts(self, column: Any) -> bool:
        return is_tensor_collection(column)

    def num_rows(self, column: TensorDictBase) -> int:
        return column.batch_size[0]

    def take(self, column: TensorDictBase, rows: np.ndarray) -> TensorDictBase:
        return self._of(column, {name: take(entry, rows) for name, entry in column.items()}, len(rows))

    def cut(self, column: TensorDictBase, start: int, stop: int) -> TensorDictBase:
        return self._of(column, {name: cut(entry, start, stop) for name, entry in column.items()}, stop - start)

    def split(self, column: TensorDictBase, bounds: Sequence[int]) -> Sequence[Any]:
        return [self.cut(column, start, stop) for start, stop in pairwise(bounds)]

    def join(self, columns: Sequence[TensorDictBase]) -> TensorDictBase:
        require_one("set of names", [sorted(column.keys()) for column in columns])
        joined = {name: join([column.get(name) for column in columns], name) for name in list(columns[0].keys())}
        return self._of(columns[0], joined, sum(column.batch_size[0] for column in columns))

    def cell(self, column: TensorDictBase, row: int) -> TensorDictBase:
        entries = {name: cell(entry, row) for name, entry in column.items()}
        return TensorDict(entries, batch_size=column.batch_size[1:], device=column.device)

    def num_bytes(self, column: TensorDictBase) -> int:
        return sum(num_bytes(entry) for entry in column.values())

    def _of(self, like: TensorDictBase, entries: dict[str, Any], num_rows: int) -> TensorDictBase:
        return TensorDict(entries, batch_size=[num_rows, *like.batch_size[1:]], device=like.device)


def _array_of_entry(column: NonTensorStack | NonTensorData) -> np.ndarray:
    if isinstance(column, NonTensorStack):
        return array_of(column)
    return column_of_objects([column.data] * column.batch_size[0])


ENTRIES: tuple[ColumnKind, ...] = (_Values(), _Shared(), _Table())
