"""Moving rows into a second dimension and back: groups of answers, chunks of columns."""

# B rows, N new rows, K = B / N old rows in each

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from kapell.protocol.columns import column_of_objects, take
from kapell.protocol.container import BatchContainer

Batch = TypeVar("Batch", bound=BatchContainer)

__all__ = ["fold_batch_dim", "split_second_dim", "unfold_batch_dim"]


def fold_batch_dim(data: Batch, new_batch_size: int) -> Batch:
    """Fold B rows into ``new_batch_size`` rows of K consecutive old ones: (B, ...) becomes (N, K, ...).

    Padded rows fold into padded rows, and into no others. Tensors share their memory where torch can view them so.
    """
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise ValueError(f"cannot fold {len(data)} rows into {new_batch_size}; the new size divides the old one")
    width = len(data) // new_batch_size

    def fold(column: Any) -> Any:
        return _dense(column).reshape((new_batch_size, width, *column.shape[1:]))

    folded = _reshaped(data, fold, new_batch_size)
    folded._padded = None if data._padded is None else _folded_mark(data._padded.reshape(new_batch_size, width))
    return folded


def unfold_batch_dim(data: Batch, batch_dims: int = 2) -> Batch:
    """Make rows of the first ``batch_dims`` dimensions: (N, K, ...) becomes (B, ...).

    Rows of a padded row are padded. Tensors share their memory where torch can view them so.
    """
    shapes = {name: tuple(_dense(data.column(name)).shape[:batch_dims]) for name in data.columns}
    leading = next(iter(shapes.values()), (0,) * batch_dims)
    for name, shape in shapes.items():
        if len(shape) < batch_dims or shape != leading:
            raise ValueError(f"column {name!r} starts with {shape}, not with {batch_dims} dimensions {leading}")
    rows = int(np.prod(leading))
    unfolded = _reshaped(data, lambda column: column.reshape((rows, *column.shape[batch_dims:])), rows)
    unfolded._padded = None if data._padded is None else np.repeat(data._padded, int(np.prod(leading[1:])))
    return unfolded


def split_second_dim(data: Batch, n_split: int, split_keys: Sequence[str]) -> Batch:
    """Cut the second dimension of some columns into rows; the other columns repeat each row ``n_split`` times.

    A cell of an object column is cut as the sequence that it is.
    """
    if n_split < 1:
        raise ValueError(f"cannot cut columns into {n_split} chunks; n_split is at least 1")
    for name in split_keys:
        data.column(name)
    rows = np.repeat(np.arange(len(data)), n_split)

    def unfold(name: str, column: Any) -> Any:
        return _cut_second(name, column, n_split) if name in split_keys else take(column, rows)

    tensors = None if data.batch is None else {name: unfold(name, column) for name, column in data.batch.items()}
    arrays = {name: unfold(name, column) for name, column in data.non_tensor_batch.items()}
    unfolded = data._like(tensors, arrays, len(rows))
    unfolded._padded = None if data._padded is None else data._padded[rows]
    return unfolded


def _folded_mark(padded_NK: np.ndarray) -> np.ndarray:
    padded_N = np.asarray(padded_NK.any(axis=1))
    mixed = np.flatnonzero(padded_N & ~padded_NK.all(axis=1))
    if len(mixed):
        raise ValueError(
            f"cannot fold {padded_NK.size} rows into {len(padded_NK)}: row {mixed[0]} would hold padding beside other "
            "rows; take it away first (without_padding), and pad what is folded"
        )
    return padded_N


def _dense(column: Any) -> Any:
    if isinstance(column, torch.Tensor) and column.is_nested:
        raise ValueError("a jagged column has no second dimension of one size; pad it first")
    return column


def _reshaped(data: Batch, change: Any, rows: int) -> Batch:
    tensors = None if data.batch is None else {name: change(column) for name, column in data.batch.items()}
    return data._like(tensors, {name: change(column) for name, column in data.non_tensor_batch.items()}, rows)


def _cut_second(name: str, column: Any, n_split: int) -> Any:
    if isinstance(column, np.ndarray) and column.dtype == object and column.ndim == 1:
        cells = []
        for row, value in enumerate(column):
            if len(value) % n_split:
                raise ValueError(f"row {row} of column {name!r} has {len(value)} entries, not a multiple of {n_split}")
            size = len(value) // n_split
            cells.extend(value[part * size : (part + 1) * size] for part in range(n_split))
        return column_of_objects(cells)
    shape = _dense(column).shape
    if len(shape) < 2 or shape[1] % n_split:
        raise ValueError(f"column {name!r} of shape {tuple(shape)} has no second dimension to cut into {n_split}")
    return column.reshape((shape[0] * n_split, shape[1] // n_split, *shape[2:]))
