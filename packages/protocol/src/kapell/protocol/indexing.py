"""Which rows: every way of naming rows becomes one checked array of row numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["RowIndex", "balanced_bounds", "row_numbers"]

RowIndex = Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor | range | slice


def row_numbers(index: RowIndex, num_rows: int) -> np.ndarray:
    """Turn a mask, a list of row numbers, a range or a slice into int64 row numbers in ``[0, num_rows)``.

    Negative numbers count from the end; an empty index of any dtype means no rows. A mask must be as long as the
    batch, whatever container it comes in.

    >>> row_numbers([True, False, True], 3)
    array([0, 2])
    >>> row_numbers([0, -1], 3)
    array([0, 2])
    """
    if isinstance(index, slice):
        return np.arange(num_rows, dtype=np.int64)[index]
    array = _as_array(index)
    if array.ndim != 1:
        raise IndexError(f"rows are named by a one-dimensional index, got shape {tuple(array.shape)}")
    if array.size == 0 and array.dtype != np.bool_:
        return np.empty(0, dtype=np.int64)
    if array.dtype == np.bool_:
        if array.size != num_rows:
            raise IndexError(f"a mask of {array.size} entries cannot select from {num_rows} rows")
        return np.flatnonzero(array)
    if array.dtype.kind not in "iu":
        raise TypeError(f"rows are named by integers or booleans, got {array.dtype}")
    return _wrapped(array.astype(np.int64), num_rows)


def balanced_bounds(num_rows: int, num_parts: int) -> list[int]:
    """Give the ``num_parts + 1`` boundaries that cut rows into parts whose sizes differ by at most one.

    >>> balanced_bounds(10, 3)
    [0, 4, 7, 10]
    """
    size, longer = divmod(num_rows, num_parts)
    return [part * size + min(part, longer) for part in range(num_parts + 1)]


def _as_array(index: RowIndex) -> np.ndarray:
    if isinstance(index, torch.Tensor):
        return index.detach().cpu().numpy()
    if isinstance(index, np.ndarray):
        return index
    if isinstance(index, range):
        return np.arange(index.start, index.stop, index.step, dtype=np.int64)
    if isinstance(index, Sequence) and not isinstance(index, str | bytes):
        kinds = {isinstance(entry, bool | np.bool_) for entry in index}
        if len(kinds) > 1:
            raise TypeError("an index mixes booleans with row numbers; use one or the other")
        return np.asarray([entry.item() if isinstance(entry, torch.Tensor) else entry for entry in index])
    raise TypeError(f"indexing with {type(index).__name__} is not supported")


def _wrapped(rows: np.ndarray, num_rows: int) -> np.ndarray:
    outside = (rows < -num_rows) | (rows >= num_rows)
    if outside.any():
        raise IndexError(f"row {rows[outside][0]} is out of range for {num_rows} rows")
    return np.where(rows < 0, rows + num_rows, rows)
