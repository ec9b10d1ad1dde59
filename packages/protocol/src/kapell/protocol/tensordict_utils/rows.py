"""Row operations of plain TensorDicts: the same ones as a `DataProto` uses, column by column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from kapell.protocol.columns import cut, join, take
from kapell.protocol.columns.jagged import join_jagged
from kapell.protocol.indexing import RowIndex, balanced_bounds, row_numbers
from kapell.protocol.iteration import mini_batches

__all__ = [
    "chunk_tensordict",
    "concat_nested_tensors",
    "concat_tensordict",
    "concat_tensordict_with_none_bsz",
    "index_select_tensor_dict",
    "make_iterator",
    "pad_to_divisor",
    "unpad",
]


def index_select_tensor_dict(batch: TensorDictBase, indices: RowIndex) -> TensorDict:
    """Copy rows by a mask or by row numbers; values for all rows stay."""
    rows = row_numbers(indices, _rows_of(batch))
    return _mapped(batch, lambda column: take(column, rows), len(rows))


def chunk_tensordict(td: TensorDictBase, chunks: int) -> list[TensorDict]:
    """Cut into exactly ``chunks`` pieces whose sizes differ by at most one; they share memory with ``td``."""
    if chunks < 1:
        raise ValueError(f"cannot cut {_rows_of(td)} rows into {chunks} pieces; ask for at least 1")
    return [_cut(td, start, stop) for start, stop in pairwise(balanced_bounds(_rows_of(td), chunks))]


def concat_nested_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join jagged tensors row after row."""
    if not tensors or not all(tensor.is_nested for tensor in tensors):
        raise ValueError("concat_nested_tensors joins jagged tensors, at least one")
    return join_jagged(tensors)


def concat_tensordict(data: Sequence[TensorDictBase]) -> TensorDictBase:
    """Join TensorDicts row after row.

    Where all have one value for all rows, the first is kept, as verl does; where some have one value a row, each row
    keeps its own. The result of one TensorDict shares its memory.
    """
    if not data:
        raise ValueError("there is nothing to concatenate: got no TensorDicts")
    if len(data[0].batch_size) == 0:
        return concat_tensordict_with_none_bsz(data)
    names = list(data[0].keys())
    for number, part in enumerate(data):
        if difference := sorted(set(names) ^ set(part.keys())):
            raise ValueError(f"cannot concatenate: part 0 and part {number} differ in having column {difference[0]!r}")
    rows = sum(_rows_of(part) for part in data)
    return TensorDict({name: _joined(name, data, rows) for name in names}, batch_size=[rows], device=data[0].device)


def concat_tensordict_with_none_bsz(data: Sequence[TensorDictBase]) -> TensorDictBase:
    """Join TensorDicts that have no rows, only values for all rows: the first one's values are kept."""
    for number, part in enumerate(data):
        if len(part.batch_size):
            raise ValueError(f"part {number} has {part.batch_size[0]} rows but part 0 has no batch dimension")
    return data[0].copy()


def make_iterator(
    tensordict: TensorDictBase,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: Mapping[str, Any] | None = None,
) -> Iterator[TensorDict]:
    """Walk a TensorDict in mini-batches; see `DataProto.make_iterator`."""
    order = mini_batches(_rows_of(tensordict), mini_batch_size, epochs, seed=seed, **(dataloader_kwargs or {}))
    return (index_select_tensor_dict(tensordict, rows) for rows in order)


def pad_to_divisor(data: TensorDictBase, size_divisor: int) -> tuple[TensorDict, int]:
    """Append copies of the first rows until the size divides; give the padded TensorDict and the rows added."""
    if size_divisor < 1:
        raise ValueError(f"size_divisor is at least 1, got {size_divisor}")
    num_rows = _rows_of(data)
    pad_size = -num_rows % size_divisor
    return index_select_tensor_dict(data, np.arange(num_rows + pad_size) % max(num_rows, 1)), pad_size


def unpad(data: TensorDictBase, pad_size: int) -> TensorDict:
    """Leave out the last ``pad_size`` rows."""
    if not 0 <= pad_size <= _rows_of(data):
        raise ValueError(f"cannot take {pad_size} padding rows from a TensorDict of {_rows_of(data)}")
    return _cut(data, 0, _rows_of(data) - pad_size)


def _rows_of(data: TensorDictBase) -> int:
    if not isinstance(data, TensorDictBase):
        raise TypeError(f"a TensorDict is needed, got {type(data).__name__}")
    if len(data.batch_size) != 1:
        raise ValueError(f"rows need one batch dimension, got batch_size {tuple(data.batch_size)}")
    return int(data.batch_size[0])


def _mapped(data: TensorDictBase, change: Callable[[Any], Any], rows: int) -> TensorDict:
    return TensorDict({name: change(column) for name, column in data.items()}, batch_size=[rows], device=data.device)


def _cut(data: TensorDictBase, start: int, stop: int) -> TensorDict:
    return _mapped(data, lambda column: cut(column, start, stop), stop - start)


def _joined(name: str, data: Sequence[TensorDictBase], rows: int) -> Any:
    entries = [part.get(name) for part in data]
    if all(isinstance(entry, NonTensorData) for entry in entries):
        return NonTensorData(entries[0].data, batch_size=[rows])
    return join(entries, name)
