"""What a batch holds and what must hold of it: three parts, one number of rows."""

# B rows

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from kapell.protocol.columns import bytes_of_array, column_of_objects, cut, num_bytes, num_rows, same
from kapell.protocol.meta import copy_meta
from kapell.protocol.tensor_columns import TensorColumns

__all__ = ["BatchContainer"]


class BatchContainer:
    """The three parts of a batch, its rows, and the one way to build a batch of changed columns."""

    non_tensor_batch: dict[str, np.ndarray]
    """numpy columns; object arrays hold one Python object a row."""
    meta_info: dict[str, Any]
    """What holds for the whole batch."""

    def __init__(
        self,
        batch: TensorDictBase | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        self._tensors: TensorDictBase | TensorColumns | None = batch
        self.non_tensor_batch = {name: _as_array(name, column) for name, column in (non_tensor_batch or {}).items()}
        self.meta_info = dict(meta_info or {})
        self._padded: np.ndarray | None = None  # which rows are padding; None means no row
        self.check_consistency()

    @property
    def batch(self) -> TensorDictBase | None:
        """Tensor columns, jagged ones included; None when there are none. What is done to it is done to the batch."""
        if isinstance(self._tensors, TensorColumns):
            self._tensors = self._tensors.table()
        return self._tensors

    @batch.setter
    def batch(self, table: TensorDictBase | None) -> None:
        self._tensors = table

    def tensor_columns(self) -> dict[str, Any]:
        """Give the tensor columns by name: a dict of its own, which is had faster than the TensorDict ``batch``."""
        return dict(self._entries())

    def check_consistency(self) -> None:
        """Check that all columns have the same rows and no name is used twice; an error names the column."""
        expected, since = None, None
        if self._tensors is not None:
            if len(shape := getattr(self._tensors, "batch_size", (0,))) != 1:
                raise ValueError(f"a batch has one batch dimension, got batch_size {tuple(shape)}")
            if twice := sorted(self._entries().keys() & self.non_tensor_batch.keys()):
                raise ValueError(f"column {twice[0]!r} is both a tensor and a non-tensor column")
            expected, since = len(self), "the tensor columns"
        for name, column in self.non_tensor_batch.items():
            if not isinstance(column, np.ndarray):
                raise TypeError(f"column {name!r} of non_tensor_batch is a numpy array, got {type(column).__name__}")
            if column.ndim == 0:
                raise ValueError(f"column {name!r} has no rows: it is a single value of shape ()")
            if expected is not None and column.shape[0] != expected:
                raise ValueError(f"column {name!r} has {column.shape[0]} rows, but there are {expected} in {since}")
            expected, since = column.shape[0], f"column {name!r}" if since is None else since

    def __len__(self) -> int:
        tensors = self._tensors
        if tensors is not None:
            return tensors.num_rows if isinstance(tensors, TensorColumns) else int(tensors.batch_size[0])
        return next((int(column.shape[0]) for column in self.non_tensor_batch.values()), 0)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns, tensors first."""
        tensors = self._tensors
        if isinstance(tensors, TensorColumns):
            return (*tensors.entries, *self.non_tensor_batch)
        return (*(() if tensors is None else tensors.keys()), *self.non_tensor_batch)

    def column(self, name: str) -> Any:
        """Give one column, tensor or numpy array."""
        tensors = self._tensors
        if isinstance(tensors, TensorColumns):
            if name in tensors.entries:
                return tensors.entries[name]
        elif tensors is not None and name in tensors.keys():  # noqa: SIM118  # a TensorDict is no Mapping
            return tensors.get(name)
        if name in self.non_tensor_batch:
            return self.non_tensor_batch[name]
        raise KeyError(f"no column {name!r}; columns are {list(self.columns)}")

    def column_bytes(self) -> dict[str, int]:
        """Weigh each column: exact for numbers, estimated from a few cells for Python objects."""
        return {name: num_bytes(column) for name, column in self._items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        tensors = self._tensors
        if not isinstance(tensors, TensorColumns):
            tensors = TensorColumns(self._entries(), len(self), None)
        return tensors.nbytes + sum(map(bytes_of_array, self.non_tensor_batch.values()))

    @property
    def padding_mask(self) -> torch.Tensor:
        """Boolean (B,): True where a row was added by padding, so that means can leave it out."""
        if self._padded is None:
            return torch.zeros(len(self), dtype=torch.bool)
        return torch.from_numpy(self._padded.copy())

    def __eq__(self, other: object) -> bool:
        """Compare columns (dtype, shape, values; NaN equals NaN) and ``meta_info``."""
        if not isinstance(other, BatchContainer):
            return NotImplemented
        if len(self) != len(other) or set(self.columns) != set(other.columns):
            return False
        columns_agree = all(same(column, other.column(name)) for name, column in self._items())
        return columns_agree and same(self.meta_info, other.meta_info)

    __hash__ = None  # a batch can change

    def __copy__(self) -> Self:
        return self._map(lambda column: cut(column, 0, num_rows(column)), len(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        clone = copy.copy(self)
        memo[id(self)] = clone
        clone.__dict__ = {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        return clone

    def _entries(self) -> dict[str, Any]:
        """The tensor columns, to be read only."""
        tensors = self._tensors
        if isinstance(tensors, TensorColumns):
            return tensors.entries
        return {} if tensors is None else dict(tensors.items())

    def _items(self) -> Iterator[tuple[str, Any]]:
        yield from self._entries().items()
        yield from self.non_tensor_batch.items()

    def _map(self, change: Callable[[Any], Any], rows: int) -> Self:
        """Apply one row operation to every column, and to what is known about rows."""
        changed = self._rows_of(
            {name: change(column) for name, column in self._entries().items()},
            {name: change(column) for name, column in self.non_tensor_batch.items()},
            rows,
        )
        changed._padded = None if self._padded is None else change(self._padded)
        return changed

    def _like(self, tensors: dict[str, Any] | None, arrays: dict[str, np.ndarray], rows: int) -> Self:
        """Build a batch of these columns, with this one's type, device and a copy of its ``meta_info``."""
        batch = None if tensors is None else TensorDict(tensors, batch_size=[rows], device=self._device)
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=copy_meta(self.meta_info))

    def _rows_of(self, tensors: dict[str, Any], arrays: dict[str, np.ndarray], rows: int) -> Self:
        """Do as `_like` for the same columns after one row operation, without the checks that then say nothing new."""
        if type(self).__init__ is BatchContainer.__init__ and all(len(column) == rows for column in arrays.values()):
            return self._made(tensors, arrays, rows)
        return self._like(None if self._tensors is None else tensors, arrays, rows)

    def _made(
        self, tensors: dict[str, Any], arrays: dict[str, np.ndarray], rows: int, row_bytes: int | None = None
    ) -> Self:
        kind = type(self)
        made = kind.__new__(kind)
        made._tensors = None if self._tensors is None else TensorColumns(tensors, rows, self._tensors.device, row_bytes)
        made.non_tensor_batch = arrays
        made.meta_info = copy_meta(self.meta_info) if self.meta_info else {}
        made._padded = None
        return made

    @property
    def _device(self) -> torch.device | None:
        return None if self._tensors is None else self._tensors.device


def _as_array(name: str, column: Any) -> np.ndarray:
    if isinstance(column, np.ndarray):
        return column
    if isinstance(column, list | tuple):
        return column_of_objects(column)
    raise TypeError(f"column {name!r} is a numpy array or a list with one entry a row, got {type(column).__name__}")
