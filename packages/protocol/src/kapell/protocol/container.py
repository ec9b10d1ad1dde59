"""What a batch holds and what must hold of it: three parts, one number of rows."""

# B rows

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from kapell.protocol.columns import column_of_objects, cut, num_bytes, num_rows, same
from kapell.protocol.meta import copy_meta

__all__ = ["BatchContainer"]


class BatchContainer:
    """The three parts of a batch, its rows, and the one way to build a batch of changed columns."""

    batch: TensorDictBase | None
    """Tensor columns, jagged ones included; None when there are none."""
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
        self.batch = batch
        self.non_tensor_batch = {name: _as_array(name, column) for name, column in (non_tensor_batch or {}).items()}
        self.meta_info = dict(meta_info or {})
        self._padded: np.ndarray | None = None  # which rows are padding; None means no row
        self.check_consistency()

    def check_consistency(self) -> None:
        """Check that all columns have the same rows and no name is used twice; an error names the column."""
        if self.batch is not None:
            if len(self.batch.batch_size) != 1:
                raise ValueError(f"a batch has one batch dimension, got batch_size {tuple(self.batch.batch_size)}")
            if twice := sorted(set(self.batch.keys()) & set(self.non_tensor_batch)):
                raise ValueError(f"column {twice[0]!r} is both a tensor and a non-tensor column")
        expected, since = (None, None) if self.batch is None else (self.batch.batch_size[0], "the tensor columns")
        for name, column in self.non_tensor_batch.items():
            if not isinstance(column, np.ndarray):
                raise TypeError(f"column {name!r} of non_tensor_batch is a numpy array, got {type(column).__name__}")
            if column.ndim == 0:
                raise ValueError(f"column {name!r} has no rows: it is a single value of shape ()")
            if expected is not None and column.shape[0] != expected:
                raise ValueError(f"column {name!r} has {column.shape[0]} rows, but there are {expected} in {since}")
            expected, since = column.shape[0], f"column {name!r}" if since is None else since

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((int(column.shape[0]) for column in self.non_tensor_batch.values()), 0)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns, tensors first."""
        return tuple(name for name, _ in self._items())

    def column(self, name: str) -> Any:
        """Give one column, tensor or numpy array."""
        if self.batch is not None and name in self.batch.keys():  # noqa: SIM118  # a TensorDict is no Mapping
            return self.batch.get(name)
        if name in self.non_tensor_batch:
            return self.non_tensor_batch[name]
        raise KeyError(f"no column {name!r}; columns are {list(self.columns)}")

    def column_bytes(self) -> dict[str, int]:
        """Weigh each column: exact for numbers, estimated from a few cells for Python objects."""
        return {name: num_bytes(column) for name, column in self._items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(self.column_bytes().values())

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

    def _items(self) -> Iterator[tuple[str, Any]]:
        if self.batch is not None:
            yield from self.batch.items()
        yield from self.non_tensor_batch.items()

    def _map(self, change: Callable[[Any], Any], rows: int) -> Self:
        """Apply one row operation to every column, and to what is known about rows."""
        changed = self._like(
            None if self.batch is None else {name: change(column) for name, column in self.batch.items()},
            {name: change(column) for name, column in self.non_tensor_batch.items()},
            rows,
        )
        changed._padded = None if self._padded is None else change(self._padded)
        return changed

    def _like(self, tensors: dict[str, Any] | None, arrays: dict[str, np.ndarray], rows: int) -> Self:
        """Build a batch of these columns, with this one's type, device and a copy of its ``meta_info``."""
        device = None if self.batch is None else self.batch.device
        batch = None if tensors is None else TensorDict(tensors, batch_size=[rows], device=device)
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=copy_meta(self.meta_info))


def _as_array(name: str, column: Any) -> np.ndarray:
    if isinstance(column, np.ndarray):
        return column
    if isinstance(column, list | tuple):
        return column_of_objects(column)
    raise TypeError(f"column {name!r} is a numpy array or a list with one entry a row, got {type(column).__name__}")
