"""`DataProto`: the batch that travels between the controller and its workers."""

# B rows

from __future__ import annotations

import builtins
import copy
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from kapell.protocol.columns import cell, flat_objects, num_rows
from kapell.protocol.compact import compacted, opened_arrays, opened_tensors
from kapell.protocol.config import DataProtoConfig
from kapell.protocol.conversion import parts_of_tensordict, to_tensordict
from kapell.protocol.disk import read_batch, write_batch
from kapell.protocol.display import describe, summary, to_html
from kapell.protocol.folding import split_second_dim
from kapell.protocol.indexing import RowIndex
from kapell.protocol.meta import copy_meta
from kapell.protocol.naming import ColumnOperations
from kapell.protocol.packing import Standin, is_plain
from kapell.protocol.rows import RowOperations
from kapell.protocol.tensor_columns import TensorColumns
from kapell.protocol.wire import pack, unpack

__all__ = ["DataProto", "DataProtoItem"]

_NUM_PARTS = 4  # of a batch's state


@dataclass
class DataProtoItem:
    """One row of a batch."""

    batch: TensorDictBase | None = None
    """Its tensors, without the batch dimension."""
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    """Its other values by column name."""
    meta_info: dict[str, Any] = field(default_factory=dict)
    """A copy of the batch's ``meta_info``."""


class DataProto(RowOperations, ColumnOperations):
    """A batch of rows: tensor columns, numpy columns, and ``meta_info`` for the whole batch.

    Operations return new batches and leave this one alone; `pop`, `reorder` and `padding` change the batch they are
    called on. Results of `slice`, `chunk`, `split`, `split_at`, `select`, `rename`, `union`, of `to` without a move and
    of `concat` of one batch share the memory of tensors and arrays with their source: writing into one in place shows
    in both. `clone` copies them.

    >>> batch = DataProto.from_dict({"ids": torch.arange(3)}, {"text": ["a", "b", "c"]}, {"step": 1})
    >>> [len(piece) for piece in batch.chunk(2)]
    [2, 1]
    >>> batch[[2, 0]].non_tensor_batch["text"].tolist()
    ['c', 'a']
    """

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Build a batch from columns; what is passed in is not changed.

        A list in ``non_tensors`` becomes one Python object a row, whatever the objects look like. ``auto_padding``
        allows dispatch to pad this batch.
        """
        if num_batch_dims != 1:
            raise ValueError(f"a batch has one batch dimension, got num_batch_dims={num_batch_dims}")
        arrays = {
            name: flat_objects(column) if isinstance(column, np.ndarray) else column
            for name, column in (non_tensors or {}).items()
        }
        meta = copy_meta(meta_info)
        if auto_padding:
            meta[DataProtoConfig.auto_padding_key] = True
        return cls(batch=_table(tensors) if tensors else None, non_tensor_batch=arrays, meta_info=meta)

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None, auto_padding: bool = False
    ) -> Self:
        """Build a batch from one dict of tensors, arrays and lists, sorted by their types."""
        tensors = {name: column for name, column in data.items() if _is_tensor_column(column)}
        others = {name: column for name, column in data.items() if not _is_tensor_column(column)}
        return cls.from_dict(tensors=tensors, non_tensors=others, meta_info=meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDictBase, meta_info: Mapping[str, Any] | None = None, num_batch_dims: int = 1
    ) -> Self:
        """Build a batch from a TensorDict: its values for all rows go to ``meta_info``, its values a row to arrays."""
        if num_batch_dims != 1 or len(tensor_dict.batch_size) > 1:
            raise ValueError(f"a batch has one batch dimension, got batch_size {tuple(tensor_dict.batch_size)}")
        tensors, arrays, values = parts_of_tensordict(tensor_dict)
        batch = TensorDict(tensors, tensor_dict.batch_size, device=tensor_dict.device) if tensors else None
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=copy_meta(values | dict(meta_info or {})))

    def to_tensordict(self) -> TensorDict:
        """Give columns and ``meta_info`` as one TensorDict, at a cost that does not grow with the rows."""
        return to_tensordict(self.batch, self.non_tensor_batch, copy_meta(self.meta_info), len(self))

    def __getitem__(self, item: int | RowIndex) -> Any:
        """Give rows as a `DataProto`, or one row as a `DataProtoItem` for a whole number."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, bool | np.bool_ | tuple | str):
            raise TypeError(f"Indexing with {type(item).__name__} is not supported; use a number, slice, list or mask")
        if isinstance(item, int | np.integer):
            return self._row(int(item))
        return self.select_idxs(item)

    def save(self, path: str | os.PathLike[str], *, allow_pickle: bool = False) -> None:
        """Write the batch to one file that runs no code when it is read (safetensors with a JSON manifest).

        Objects that JSON cannot express are refused by name unless ``allow_pickle``.
        """
        write_batch(self, path, allow_pickle=allow_pickle)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        columns: Iterable[str] | None = None,
        rows: builtins.slice | None = None,
        allow_pickle: bool = False,
    ) -> Self:
        """Read a batch, or only some columns and a range of rows of it, from a file that `save` wrote."""
        batch, arrays, meta, padded = read_batch(path, columns=columns, rows=rows, allow_pickle=allow_pickle)
        loaded = cls(batch=batch, non_tensor_batch=arrays, meta_info=meta)
        loaded._padded = padded
        return loaded

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Do as `save`, under verl's name."""
        self.save(filepath)

    @classmethod
    def load_from_disk(cls, filepath: str | os.PathLike[str]) -> Self:
        """Do as `load`, under verl's name."""
        return cls.load(filepath)

    def describe(self, rows: int = 3) -> str:
        """Give a table for a person: columns, dtypes, shapes, bytes, and the first rows."""
        return describe(self, rows)

    def get_data_info(self) -> str:
        """Give the table without values, under verl's name."""
        return describe(self, 0)

    def __repr__(self) -> str:
        return summary(self)

    def _repr_html_(self) -> str:
        return to_html(self)

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Cut the second dimension of the named columns into ``n_split`` rows; other columns repeat each row.

        A cell of an object column is cut as the sequence that it is.
        """
        return split_second_dim(self, n_split, split_keys or ())

    def clone(self) -> Self:
        """Copy all tensor and numpy columns.

        Python objects in cells, and what the containers in ``meta_info`` hold, are shared; `copy.deepcopy` copies them.
        """
        return self.select_idxs(range(len(self)))

    def _row(self, row: int) -> DataProtoItem:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} is out of range for {len(self)} rows")
        row %= len(self)
        batch = None
        if self.batch is not None:
            entries = {name: cell(column, row) for name, column in self.batch.items()}
            batch = TensorDict(entries, batch_size=[], device=self.batch.device)
        others = {name: cell(column, row) for name, column in self.non_tensor_batch.items()}
        return DataProtoItem(batch=batch, non_tensor_batch=others, meta_info=copy_meta(self.meta_info))

    def __getstate__(self) -> Any:
        return pack(self.__kapell_state__())

    def __setstate__(self, state: Any) -> None:
        plain = unpack(state)
        self._restore(plain)
        if plain is not state:  # a state that has not been pickled has the containers of another batch
            self.__dict__.update(copy.copy(self).__dict__)

    def __kapell_state__(self) -> dict[str, Any]:
        """Give what travels, by name."""
        state = {"batch": self._tensors, **self.__dict__}
        table = state.pop("_tensors")
        if type(table) is TensorDict:
            state["batch"] = TensorColumns(dict(table.items()), len(self), table.device)
        return state

    @classmethod
    def __kapell_restore__(cls, state: dict[str, Any]) -> Self:
        restored = cls.__new__(cls)
        restored._restore(state)
        return restored

    def _restore(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tensors = self.__dict__.pop("batch")

    def __kapell_bytes__(self, room: int) -> bytes | None:
        """Give a batch of plain columns with at most ``room`` bytes as a pickle; None for any other."""
        table, meta = self._tensors, self.meta_info
        if type(self) is not DataProto or len(self.__dict__) != _NUM_PARTS or self._padded is not None:
            return None
        if not is_plain(meta, 3) or (table is not None and table.device is not None):
            return None
        columns = compacted(self._entries(), self.non_tensor_batch, room)
        if columns is None:
            return None
        rows = None if table is None else len(self)
        return pickle.dumps(Standin(self, _from_compact, (rows, meta, *columns)), protocol=5)

    def __kapell_keep__(self, store: Any) -> Any:
        """Leave the columns in a store, by reference."""
        from kapell.protocol.stored import StoredBatch  # it is made of this class

        return StoredBatch.put(self, store)

    def __kapell_private__(self, private: Callable[[Any], Any]) -> Self:
        """Give a copy as if this batch had travelled; ``private`` copies what the batch does not copy itself."""
        own = ("_tensors", "non_tensor_batch")
        state = {name: private(value) for name, value in self.__dict__.items() if name not in own}
        copies: dict[Any, Any] = {}
        tensors = {name: _private_column(column, copies, private) for name, column in self.tensor_columns().items()}
        copied = type(self).__new__(type(self))
        copied.__dict__.update(state)
        copied.non_tensor_batch = {name: private(column) for name, column in self.non_tensor_batch.items()}
        copied._tensors = None if self._tensors is None else TensorColumns(tensors, len(self), self._device)
        return copied


def _from_compact(rows: int | None, meta: dict[str, Any], tensors: Any, arrays: Any) -> DataProto:
    """Give the batch that `DataProto.__kapell_bytes__` pickled."""
    batch = DataProto.__new__(DataProto)
    batch._tensors = None if rows is None else TensorColumns(opened_tensors(tensors), rows, None)
    batch.non_tensor_batch = opened_arrays(arrays)
    batch.meta_info = meta
    batch._padded = None
    return batch


def _is_tensor_column(column: Any) -> bool:
    return isinstance(column, torch.Tensor) or is_tensor_collection(column)


def _private_column(column: Any, copies: dict[Any, Any], private: Callable[[Any], Any]) -> Any:
    """Copy a column; columns on the same memory share their copy, as they would after they had travelled."""
    if type(column) is not torch.Tensor or column.layout != torch.strided or column.is_nested:
        return private(column)
    place = column.data_ptr() or column.device  # without numbers it has no memory, on any device
    key = (place, column.dtype, column.shape, column.stride(), column.is_conj(), column.is_neg())
    copied = copies.get(key)
    if copied is None:
        copied = copies[key] = column.detach().clone(memory_format=torch.contiguous_format)
    return copied.detach().requires_grad_() if column.requires_grad and column.is_leaf else copied


def _table(tensors: Mapping[str, torch.Tensor]) -> TensorDict:
    rows, since = 0, None
    for name, column in tensors.items():
        if not _is_tensor_column(column):
            raise TypeError(f"column {name!r} of tensors is a tensor, got {type(column).__name__}; see non_tensors")
        if len(column.shape) == 0:
            raise ValueError(f"column {name!r} has no rows: it is a single value of shape ()")
        if since is not None and num_rows(column) != rows:
            raise ValueError(f"column {name!r} has {num_rows(column)} rows, but there are {rows} in column {since!r}")
        rows, since = num_rows(column), since or name
    return TensorDict(dict(tensors), batch_size=[rows])
