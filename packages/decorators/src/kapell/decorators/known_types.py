"""Splitters of lists, tuples, numpy arrays, tensors and TensorDicts; none of these libraries is imported for it.

A type is recognised by its dotted name. By the time a value of it arrives, its library is in `sys.modules`.
"""

import sys
from array import array
from collections.abc import Sequence
from itertools import chain
from types import ModuleType
from typing import Any

from kapell.decorators import ragged
from kapell.decorators.splitter import Splitter

__all__ = ["KNOWN_SPLITTERS", "size_of"]

_MAX_WEIGHED_ROWS = 64  # rows of one list are mostly alike


def _library(name: str) -> ModuleType:
    return sys.modules[name]


def _cut_slice(value: Any, start: int, stop: int) -> Any:
    return value[start:stop]


def _list_take(value: list[Any], positions: Sequence[int]) -> list[Any]:
    return [value[position] for position in positions]


def _list_join(parts: list[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(parts))


def _sequence_nbytes(value: Sequence[Any]) -> int:
    """Exact for few rows; for many, estimated from some of them, as it is asked for in every call."""
    step = max(1, len(value) // _MAX_WEIGHED_ROWS)
    weighed = value[::step]
    return sum(map(size_of, weighed)) * len(value) // max(1, len(weighed))


def size_of(value: Any) -> int:
    """Bytes of a value without rows."""
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    return _sequence_nbytes(value) if isinstance(value, list | tuple) else sys.getsizeof(value)


def _tuple_has_rows(value: tuple[Any, ...]) -> bool:
    return not hasattr(value, "_fields")  # a namedtuple is a record, not rows


def _array_has_rows(value: Any) -> bool:
    return value.ndim > 0


def _array_take(value: Any, positions: Sequence[int]) -> Any:
    return value[_library("numpy").asarray(positions, dtype="int64")]


def _array_join(parts: list[Any]) -> Any:
    return _library("numpy").concatenate(parts)


def _index(positions: Sequence[int], device: Any) -> Any:
    torch = _library("torch")
    if isinstance(positions, range):
        return torch.arange(positions.start, positions.stop, positions.step, device=device)
    if isinstance(positions, array) and len(positions):
        return torch.frombuffer(positions, dtype=torch.int64).to(device)
    return torch.as_tensor(list(positions), dtype=torch.int64, device=device)


def _tensor_length(value: Any) -> int:
    return int(value.size(0)) if value.is_nested else len(value)


def _tensor_cut(value: Any, start: int, stop: int) -> Any:
    return ragged.cut(value, start, stop) if value.is_nested else value[start:stop]


def _tensor_take(value: Any, positions: Sequence[int]) -> Any:
    return ragged.take(value, positions) if value.is_nested else value[_index(positions, value.device)]


def _tensor_join(parts: list[Any]) -> Any:
    return ragged.join(parts) if parts[0].is_nested else _library("torch").cat(parts)


def _tensor_nbytes(value: Any) -> int:
    return int(value.values().nbytes if value.is_nested else value.nbytes)


def _dict_has_rows(value: Any) -> bool:
    return value.batch_dims > 0


def _dict_length(value: Any) -> int:
    return int(value.batch_size[0])


def _ragged_columns(value: Any) -> list[str]:
    return [name for name, entry in value.items() if getattr(entry, "is_nested", False)]


def _dict_rows(value: Any, index: Any, rows: Any) -> Any:
    """Rows of a TensorDict: plain entries by `index`, ragged ones by `rows(entry)`."""
    ragged_names = _ragged_columns(value)
    if not ragged_names:
        return value[index]
    part = value.exclude(*ragged_names)[index]
    for name in ragged_names:
        part[name] = rows(value[name])
    return part


def _dict_cut(value: Any, start: int, stop: int) -> Any:
    return _dict_rows(value, slice(start, stop), lambda entry: ragged.cut(entry, start, stop))


def _dict_take(value: Any, positions: Sequence[int]) -> Any:
    return _dict_rows(value, _index(positions, value.device), lambda entry: ragged.take(entry, positions))


def _dict_join(parts: list[Any]) -> Any:
    ragged_names = _ragged_columns(parts[0])
    if not ragged_names:
        return _library("torch").cat(parts)
    joined = _library("torch").cat([part.exclude(*ragged_names) for part in parts])
    for name in ragged_names:
        joined[name] = ragged.join([part[name] for part in parts])
    return joined


def _dict_columns(value: Any) -> tuple[str, ...]:
    return tuple(value.keys())


def _dict_select(value: Any, names: Sequence[str]) -> Any:
    return value.select(*names)


def _dict_column(value: Any, name: str) -> Any:
    return value[name]


def _dict_nbytes(value: Any) -> int:
    return sum(_entry_nbytes(entry) for entry in value.values())


def _entry_nbytes(entry: Any) -> int:
    if hasattr(entry, "batch_size"):
        return _dict_nbytes(entry)
    return _tensor_nbytes(entry) if hasattr(entry, "is_nested") else size_of(entry)


KNOWN_SPLITTERS: dict[str, Splitter] = {
    "builtins.list": Splitter(
        kind="list", length=len, take=_list_take, cut=_cut_slice, join=_list_join, nbytes=_sequence_nbytes
    ),
    "builtins.tuple": Splitter(
        kind="tuple",
        length=len,
        take=lambda value, positions: tuple(_list_take(value, positions)),
        cut=_cut_slice,
        join=lambda parts: tuple(_list_join(parts)),
        has_rows=_tuple_has_rows,
        nbytes=_sequence_nbytes,
    ),
    "numpy.ndarray": Splitter(
        kind="array",
        length=len,
        take=_array_take,
        cut=_cut_slice,
        join=_array_join,
        has_rows=_array_has_rows,
        nbytes=lambda value: value.nbytes,
    ),
    "torch.Tensor": Splitter(
        kind="Tensor",
        length=_tensor_length,
        take=_tensor_take,
        cut=_tensor_cut,
        join=_tensor_join,
        has_rows=_array_has_rows,
        nbytes=_tensor_nbytes,
    ),
    "tensordict.base.TensorDictBase": Splitter(
        kind="TensorDict",
        length=_dict_length,
        take=_dict_take,
        cut=_dict_cut,
        join=_dict_join,
        has_rows=_dict_has_rows,
        columns=_dict_columns,
        select=_dict_select,
        column=_dict_column,
        nbytes=_dict_nbytes,
    ),
}
"""By dotted name of the type, which subclasses share."""
