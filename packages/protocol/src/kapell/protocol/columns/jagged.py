"""Row operations of jagged tensors, done on values and offsets and never row by row.

A jagged tensor of B rows holds ``values`` (all rows joined along the ragged dimension) and ``offsets`` (B + 1 cuts).
The ragged dimension is declared with the tensor: rows of shape (4, len) have ragged dimension 2, also when all
lengths happen to be equal.
"""

# B rows; V entries of all rows together along the ragged dimension

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = [
    "column_of_rows",
    "cut_jagged",
    "from_rows",
    "is_jagged",
    "join_jagged",
    "make_jagged",
    "parts_of",
    "ragged_dim",
    "take_jagged",
]


def is_jagged(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is nested with the jagged layout."""
    return tensor.is_nested and tensor.layout == torch.jagged


def ragged_dim(tensor: torch.Tensor) -> int:
    """Give the dimension (counting rows as 0) along which rows differ in length."""
    return tensor._ragged_idx  # ty: ignore[missing-attribute]  # torch offers no public way to ask


def make_jagged(values: torch.Tensor, offsets: torch.Tensor, ragged: int) -> torch.Tensor:
    """Build a jagged tensor from joined values, the B + 1 offsets and the declared ragged dimension."""
    lengths = offsets.diff()
    # Without the longest length torch pads to the size of the first dimension, which cuts rows short.
    shortest, longest = (int(lengths.min()), int(lengths.max())) if lengths.numel() else (0, 0)
    return torch.nested.nested_tensor_from_jagged(
        values, offsets=offsets, jagged_dim=ragged, min_seqlen=shortest, max_seqlen=longest
    )


def from_rows(rows: Sequence[torch.Tensor], ragged: int | None = None) -> torch.Tensor:
    """Join row tensors into one jagged tensor; the ragged dimension is the last one unless said otherwise."""
    if not rows:
        raise ValueError("a jagged tensor needs at least one row to know its shape")
    num_dims = rows[0].dim()
    ragged = num_dims if ragged is None else ragged
    if not 1 <= ragged <= num_dims:
        raise ValueError(f"ragged_idx must be in [1, {num_dims}] for rows of {num_dims} dimensions, got {ragged}")
    dim = ragged - 1
    lengths = torch.tensor([row.shape[dim] for row in rows], dtype=torch.int64, device=rows[0].device)
    return make_jagged(torch.cat(list(rows), dim=dim), _offsets(lengths), ragged)


def column_of_rows(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Make a column of row tensors: dense where all have one shape, else jagged along the first size that differs.

    >>> column_of_rows([torch.zeros(2), torch.zeros(2)]).shape
    torch.Size([2, 2])
    """
    first = rows[0].shape
    if all(row.shape == first for row in rows):
        return torch.stack(list(rows))
    if any(row.dim() != len(first) for row in rows):
        raise ValueError(f"rows of one column have one number of dimensions, got {sorted({r.dim() for r in rows})}")
    return from_rows(rows, next(dim for dim in range(len(first)) if len({row.shape[dim] for row in rows}) > 1) + 1)


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Give values, offsets and ragged dimension, with holes between rows closed and offsets starting at 0."""
    jagged: Any = tensor  # its type, with offsets(), is private to torch
    values, offsets, ragged = jagged.values(), jagged.offsets(), ragged_dim(tensor)
    lengths = jagged.lengths()  # only narrowed jagged tensors, whose rows have holes between them, store lengths
    if lengths is not None:
        return _gather(values, offsets[:-1], lengths, ragged)
    first, last = (int(offsets[0]), int(offsets[-1])) if offsets.numel() else (0, 0)
    if first != 0 or last != values.shape[ragged - 1]:
        values, offsets = values.narrow(ragged - 1, first, last - first), offsets - first
    return values, offsets, ragged


def take_jagged(tensor: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """Copy the given rows, in the given order."""
    values, offsets, ragged = parts_of(tensor)
    rows_at = torch.from_numpy(rows).to(offsets.device)
    return make_jagged(*_gather(values, offsets[:-1][rows_at], offsets.diff()[rows_at], ragged))


def cut_jagged(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Give rows start to stop as a view of the same values."""
    values, offsets, ragged = parts_of(tensor)
    first, last = int(offsets[start]), int(offsets[stop])
    return make_jagged(values.narrow(ragged - 1, first, last - first), offsets[start : stop + 1] - first, ragged)


def join_jagged(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join jagged tensors (and dense ones, whose rows all have one length) row after row.

    A piece whose rows happen to have equal shapes adapts to the ragged dimension of the others.
    """
    ragged = _common_ragged_dim(tensors)
    pieces = [_with_ragged_dim(tensor, ragged) for tensor in tensors]
    lengths = torch.cat([offsets.diff() for _, offsets in pieces])
    return make_jagged(torch.cat([values for values, _ in pieces], dim=ragged - 1), _offsets(lengths), ragged)


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, dim=0, out=offsets[1:])
    return offsets


def _gather(
    values: torch.Tensor, starts_B: torch.Tensor, lengths_B: torch.Tensor, ragged: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    offsets = _offsets(lengths_B)
    num_values = int(offsets[-1])
    shift_V = torch.repeat_interleave(starts_B - offsets[:-1], lengths_B, output_size=num_values)
    positions_V = torch.arange(num_values, device=values.device) + shift_V
    return values.index_select(ragged - 1, positions_V), offsets, ragged


def _row_shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Give the shape that every row has, or None when rows differ."""
    if not tensor.is_nested:
        return tuple(tensor.shape[1:])
    values, offsets, ragged = parts_of(tensor)
    lengths = offsets.diff()
    if lengths.numel() and bool((lengths != lengths[0]).any()):
        return None
    shape = list(values.shape)
    shape[ragged - 1] = int(lengths[0]) if lengths.numel() else 0
    return tuple(shape)


def _common_ragged_dim(tensors: Sequence[torch.Tensor]) -> int:
    declared = [(ragged_dim(tensor), tensor) for tensor in tensors if tensor.is_nested]
    if len({dim for dim, _ in declared}) == 1:
        return declared[0][0]
    fixed = {dim for dim, tensor in declared if _row_shape(tensor) is None}
    if len(fixed) > 1:
        raise ValueError(f"cannot join jagged tensors with different ragged dimensions {sorted(fixed)}")
    return fixed.pop() if fixed else declared[0][0]


def _with_ragged_dim(tensor: torch.Tensor, ragged: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give values and offsets of a piece for the wanted ragged dimension."""
    if tensor.is_nested and ragged_dim(tensor) == ragged:
        values, offsets, _ = parts_of(tensor)
        return values, offsets
    shape = _row_shape(tensor)
    if shape is None or len(shape) < ragged:
        raise ValueError(f"a piece of shape {tuple(tensor.shape)} cannot take ragged dimension {ragged}")
    dense = tensor
    num_rows = tensor.shape[0]
    if tensor.is_nested:
        values, _, own = parts_of(tensor)
        split = (*values.shape[: own - 1], num_rows, shape[own - 1], *values.shape[own:])
        dense = values.reshape(split).movedim(own - 1, 0)
    lengths = torch.full((num_rows,), shape[ragged - 1], dtype=torch.int64, device=tensor.device)
    joined = (*shape[: ragged - 1], num_rows * shape[ragged - 1], *shape[ragged:])
    return dense.movedim(0, ragged - 1).reshape(joined), _offsets(lengths)
