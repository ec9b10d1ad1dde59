"""Columns of numbers and objects: dense tensors, nested tensors and numpy arrays."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kapell.protocol.columns.jagged import cut_jagged, is_jagged, join_jagged, take_jagged
from kapell.protocol.columns.memory import large_output
from kapell.protocol.columns.objects import flat_objects
from kapell.protocol.columns.registry import ColumnKind, require_one

__all__ = ["NUMBERS", "bytes_of_array", "weight_of"]

_SAMPLED_CELLS = 8  # object columns are weighed by a few cells: weighing all would cost more than sending them

_ATOMS = frozenset({str, bytes, int, float, bool, complex, type(None)})

# torch cannot gather or join every dtype (FP8, uint16); the same bits as integers always work.
_SAME_SIZE_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EVERYWHERE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16}
    | {torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128}
)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as numbers that every torch operation takes."""
    return tensor if tensor.dtype in _EVERYWHERE else tensor.view(_SAME_SIZE_INTEGER[tensor.element_size()])


def _as(dtype: torch.dtype, bits: torch.Tensor) -> torch.Tensor:
    """Undo `_bits`. A view of the same dtype would leave autograd's graph."""
    return bits if bits.dtype == dtype else bits.view(dtype)


class _Dense:
    name = "tensor"

    def accepts(self, column: Any) -> bool:
        return isinstance(column, torch.Tensor) and not column.is_nested

    def num_rows(self, column: torch.Tensor) -> int:
        return column.shape[0]

    def take(self, column: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        rows_at = torch.from_numpy(rows).to(column.device)
        bits = _bits(column)
        out = large_output([bits], (len(rows), *bits.shape[1:]))
        return _as(column.dtype, torch.index_select(bits, 0, rows_at, out=out))

    def cut(self, column: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return column[start:stop]

    def split(self, column: torch.Tensor, bounds: Sequence[int]) -> Sequence[torch.Tensor]:
        if column.requires_grad or len(bounds) < 2:
            return [column[start:stop] for start, stop in pairwise(bounds)]
        # Views on the same memory; "unsafe" means that autograd is not told, which saves most of the time.
        rows = column[bounds[0] : bounds[-1]]
        return rows.unsafe_split_with_sizes([stop - start for start, stop in pairwise(bounds)])

    def join(self, columns: Sequence[torch.Tensor]) -> torch.Tensor:
        if len({column.dtype for column in columns}) == 1:
            dtype = columns[0].dtype
            pieces = list(columns if dtype in _EVERYWHERE else map(_bits, columns))
            rows = sum(piece.shape[0] for piece in pieces)  # len() of a tensor is a function in Python
            out = large_output(pieces, (rows, *pieces[0].shape[1:]))
            try:
                return _as(dtype, torch.cat(pieces, dim=0, out=out))
            except RuntimeError:  # of which the shapes or devices are the usual reason, and then said better below
                require_one("device", [column.device for column in columns])
                require_one("shape of a row", [tuple(column.shape[1:]) for column in columns])
                raise
        require_one("shape of a row", [tuple(column.shape[1:]) for column in columns])
        require_one("dtype", [column.dtype for column in columns])
        raise AssertionError("pieces of several dtypes differ in dtype")

    def cell(self, column: torch.Tensor, row: int) -> torch.Tensor:
        return column[row]

    def num_bytes(self, column: torch.Tensor) -> int:
        return column.numel() * column.element_size()


class _Jagged:
    name = "jagged tensor"

    def accepts(self, column: Any) -> bool:
        return isinstance(column, torch.Tensor) and is_jagged(column)

    def num_rows(self, column: torch.Tensor) -> int:
        return column.shape[0]

    def take(self, column: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        return take_jagged(column, rows)

    def cut(self, column: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return cut_jagged(column, start, stop)

    def split(self, column: torch.Tensor, bounds: Sequence[int]) -> Sequence[torch.Tensor]:
        return [self.cut(column, start, stop) for start, stop in pairwise(bounds)]

    def join(self, columns: Sequence[torch.Tensor]) -> torch.Tensor:
        require_one("dtype", [column.dtype for column in columns])
        require_one("device", [column.device for column in columns])
        return join_jagged(columns)

    def cell(self, column: torch.Tensor, row: int) -> torch.Tensor:
        return cut_jagged(column, row, row + 1).values()

    def num_bytes(self, column: torch.Tensor) -> int:
        return column.values().numel() * column.element_size() + (column.shape[0] + 1) * 8


class _StridedNested:
    """Nested tensors of the older strided layout: torch offers no values or offsets for them, so rows are unbound."""

    name = "nested tensor"

    def accepts(self, column: Any) -> bool:
        return isinstance(column, torch.Tensor) and column.is_nested

    def num_rows(self, column: torch.Tensor) -> int:
        return column.size(0)

    def take(self, column: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        pieces = column.unbind()
        return torch.nested.as_nested_tensor([pieces[row] for row in rows])

    def cut(self, column: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return self.take(column, np.arange(start, stop))

    def split(self, column: torch.Tensor, bounds: Sequence[int]) -> Sequence[torch.Tensor]:
        return [self.cut(column, start, stop) for start, stop in pairwise(bounds)]

    def join(self, columns: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([piece for column in columns for piece in column.unbind()])

    def cell(self, column: torch.Tensor, row: int) -> torch.Tensor:
        return column.unbind()[row]

    def num_bytes(self, column: torch.Tensor) -> int:
        return column.numel() * column.element_size()


class _Array:
    name = "array"

    def accepts(self, column: Any) -> bool:
        return isinstance(column, np.ndarray)

    def num_rows(self, column: np.ndarray) -> int:
        return column.shape[0]

    def take(self, column: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return column[rows]

    def cut(self, column: np.ndarray, start: int, stop: int) -> np.ndarray:
        return column[start:stop]

    def split(self, column: np.ndarray, bounds: Sequence[int]) -> Sequence[np.ndarray]:
        return [column[start:stop] for start, stop in pairwise(bounds)]

    def join(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        if len({column.dtype for column in columns}) == 1 and len({column.shape[1:] for column in columns}) == 1:
            return np.concatenate(columns, axis=0)
        if any(column.dtype == object for column in columns) and len({column.ndim for column in columns}) > 1:
            columns = [flat_objects(column) for column in columns]
        require_one("shape of a row", [column.shape[1:] for column in columns])
        if not {column.dtype.kind for column in columns} <= set("OUS"):  # objects and text of any length join
            require_one("dtype", [column.dtype for column in columns])
        return np.concatenate(list(columns), axis=0)

    def cell(self, column: np.ndarray, row: int) -> Any:
        return column[row]

    def num_bytes(self, column: np.ndarray) -> int:
        return bytes_of_array(column)


def bytes_of_array(column: np.ndarray) -> int:
    """Weigh an array: exact for numbers, estimated from a few cells for Python objects."""
    size = column.size
    if column.dtype.kind != "O" or size == 0:
        return column.nbytes
    sample = column if size <= _SAMPLED_CELLS else column.ravel()[:: size // _SAMPLED_CELLS][:_SAMPLED_CELLS]
    cells = sample.tolist() if sample.ndim == 1 else list(sample.flat)
    weigh = sys.getsizeof if _ATOMS.issuperset(map(type, cells)) else weight_of
    return column.nbytes + sum(map(weigh, cells)) * size // len(cells)


def weight_of(value: Any) -> int:
    """Estimate the bytes of one Python object, with what is directly in it."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sys.getsizeof(value) + sum(sys.getsizeof(entry) for entry in value.values())
    if isinstance(value, list | tuple):
        return sys.getsizeof(value) + sum(sys.getsizeof(entry) for entry in value)
    return sys.getsizeof(value)


NUMBERS: tuple[ColumnKind, ...] = (_Dense(), _Jagged(), _StridedNested(), _Array())
