"""Stand-ins: what is pickled in the place of tensors, arrays and TensorDicts, and how it turns back into them.

All stand-ins of one packed value refer to one `_Buffers`. Pickle's memo sends that once, before the first of them, so
each is rebuilt in place, without a walk over the arrived value.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, MemoryMappedTensor, NonTensorData, NonTensorStack, TensorDict

from kapell.protocol.arrivals import Arrivals
from kapell.protocol.columns import (
    ValueStack,
    array_of,
    column_of_objects,
    is_jagged,
    make_jagged,
    parts_of,
    raw_bytes,
)
from kapell.protocol.read_only import ReadOnlyTensor
from kapell.protocol.tensor_columns import TensorColumns

__all__ = ["Packing", "Standin", "is_plain"]

_ATOMS = frozenset({str, bytes, int, float, bool, complex, type(None)})
_OUT_OF_BAND_PROTOCOL = 5
# Those that numpy has too, by numpy's name.
_SHORT_DTYPES = {
    torch.float32: "f4",
    torch.float64: "f8",
    torch.float16: "f2",
    torch.int64: "i8",
    torch.int32: "i4",
    torch.int16: "i2",
    torch.int8: "i1",
    torch.uint8: "u1",
    torch.bool: "?",
}
_PROBE = pickle.PickleBuffer(bytearray())  # writable: kept in the stream it arrives as a bytearray, as the pieces do


class Standin:
    """Pickles as a call that rebuilds the original from other stand-ins, buffers and small values."""

    __slots__ = ("_arguments", "_original", "_rebuild")

    def __init__(self, original: Any, rebuild: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._original = original  # kept alive: the buffers are views of its memory
        self._rebuild = rebuild
        self._arguments = arguments

    def value(self) -> Any:
        """Give what it stands for."""
        return self._original

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self._rebuild, self._arguments


class _Buffers:
    """The memory of one packed value, each piece once."""

    def __init__(self, *, read_only: bool) -> None:
        self._read_only = read_only
        self._pieces: list[np.ndarray] = []
        self._known: dict[tuple[Any, ...], int] = {}

    def add(self, key: tuple[Any, ...], piece: Callable[[], np.ndarray]) -> int:
        """Give the number of a piece; ``key`` says which memory it is."""
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self._pieces)
            self._pieces.append(piece())
        return number

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if protocol < _OUT_OF_BAND_PROTOCOL:
            return Arrivals, (self._read_only, *[piece.tobytes() for piece in self._pieces], None, None)
        # The probe twice: kept in the stream it arrives as one object (by the memo), out of band as two.
        return Arrivals, (self._read_only, *[pickle.PickleBuffer(piece.data) for piece in self._pieces], _PROBE, _PROBE)


class Packing:
    """Walks one value and builds its stand-ins."""

    def __init__(self, *, read_only: bool) -> None:
        self._buffers = _Buffers(read_only=read_only)
        self._done: dict[int, tuple[Any, Any]] = {}  # by id: the value (kept alive) and what replaces it

    def standin(self, value: Any) -> Any:
        """Give what to pickle for a value: itself if there is nothing in it to replace."""
        body = self._body(value)
        return body if body is value or isinstance(body, Standin) else Standin(value, _same, (body,))

    def _body(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS or (kind is dict and not value):
            return value
        pack = _PACKERS.get(kind)
        if pack is None:
            pack = Packing._nested if isinstance(value, torch.Tensor) and value.is_nested else Packing._other
        done = self._done.get(id(value))
        if done is None:
            self._done[id(value)] = (value, value)  # met again inside itself: left to pickle, which knows cycles
            done = self._done[id(value)] = (value, pack(self, value))
        return done[1]

    def _other(self, value: Any) -> Any:
        """A type may say what travels: `__kapell_restore__` gets at arrival what `__kapell_state__` gave."""
        kind = type(value)
        restore = getattr(kind, "__kapell_restore__", None)
        if restore is None:
            return value
        state = value.__kapell_state__()
        if type(state.get("batch")) is not TensorColumns:
            return Standin(value, restore, (self._dict(state),))
        # Its columns in the same call: each function that a pickle names takes as long as a small column.
        columns = self._column_arguments(state.pop("batch"))
        return Standin(value, _batch, (kind, self._dict(state), *columns))

    def _list(self, value: list[Any]) -> Any:
        if _ATOMS.issuperset(map(type, value)) or all(map(is_plain, value)):
            return value
        bodies = [self._body(entry) for entry in value]
        return bodies if any(a is not b for a, b in zip(bodies, value, strict=True)) else value

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        bodies = tuple(self._body(entry) for entry in value)
        return bodies if any(a is not b for a, b in zip(bodies, value, strict=True)) else value

    def _dict(self, value: dict[Any, Any]) -> Any:
        if _ATOMS.issuperset(map(type, value.values())):
            return value
        bodies = {key: self._body(entry) for key, entry in value.items()}
        return bodies if any(bodies[key] is not entry for key, entry in value.items()) else value

    def _tensor(self, tensor: torch.Tensor, rebuild: Callable[..., Any] | None = None) -> Any:
        if tensor.is_nested:
            return self._nested(tensor)
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            return tensor
        number = None
        if tensor.numel():
            flags = (tensor.is_conj(), tensor.is_neg())  # the same memory, but other numbers
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), str(tensor.device), *flags)
            number = self._buffers.add(key, lambda: raw_bytes(tensor).numpy())
        dtype = str(tensor.dtype).removeprefix("torch.")
        device = None if tensor.device.type == "cpu" else str(tensor.device)
        wants_grad = tensor.requires_grad and tensor.is_leaf
        arguments = (self._buffers, number, dtype, tuple(tensor.shape), device, wants_grad)
        return Standin(tensor, rebuild or _tensor, arguments)

    def _nested(self, tensor: torch.Tensor) -> Standin:
        if not is_jagged(tensor):
            return Standin(tensor, _strided_nested, ([self._tensor(piece) for piece in tensor.unbind()],))
        values, offsets, ragged = parts_of(tensor)
        # Jagged tensors open their values to writing, so these are private at arrival even where others are read-only.
        parts = [self._tensor(part, rebuild=_private_tensor) for part in (values, offsets)]
        return Standin(tensor, make_jagged, (*parts, ragged))

    def _read_only_tensor(self, tensor: ReadOnlyTensor) -> Any:
        return self._tensor(tensor.plain())

    def _array(self, array: np.ndarray) -> Any:
        if array.dtype == object:
            cells = list(array.flat)
            return Standin(array, _objects, (self._list(cells), array.shape))
        if array.dtype.hasobject or array.dtype.itemsize == 0:
            return array
        number = None
        if array.size:
            key = (array.__array_interface__["data"][0], array.dtype.str, array.shape, array.strides)
            number = self._buffers.add(key, lambda: _flat(array))
        return Standin(array, _array, (self._buffers, number, array.dtype, array.shape))

    def _tensordict(self, table: TensorDict) -> Standin:
        entries = {name: self._body(entry) for name, entry in table.items()}
        device = None if table.device is None else str(table.device)
        return Standin(table, _tensordict, (entries, tuple(table.batch_size), device))

    def _columns(self, columns: TensorColumns) -> Standin:
        return Standin(columns, _columns, self._column_arguments(columns))

    def _column_arguments(self, columns: TensorColumns) -> tuple[Any, ...]:
        entries = {name: self._dense(entry) or self._body(entry) for name, entry in columns.entries.items()}
        device = None if columns.device is None else str(columns.device)
        return self._buffers, entries, columns.num_rows, device

    def _dense(self, tensor: Any) -> tuple[Any, ...] | None:
        """The usual column in short; None for any other."""
        if type(tensor) is not torch.Tensor or tensor.requires_grad or not tensor.is_cpu or tensor.is_nested:
            return None
        dtype = _SHORT_DTYPES.get(tensor.dtype)
        if dtype is None or tensor.layout != torch.strided or tensor.is_neg() or not tensor.numel():
            return None
        shape = tensor.shape
        key = (tensor.data_ptr(), tensor.dtype, shape, tensor.stride(), "cpu", False, False)  # as in `_tensor`
        return self._buffers.add(key, lambda: _flat(tensor.numpy())), dtype, tuple(shape)

    def _values(self, column: NonTensorStack) -> Any:
        if len(column.batch_size) != 1:
            return column
        return Standin(column, _values, (self._array(array_of(column)),))

    def _shared(self, column: NonTensorData) -> Any:
        return Standin(column, _shared, (self._body(column.data), tuple(column.batch_size)))


_PACKERS: dict[type, Callable[[Packing, Any], Any]] = {
    list: Packing._list,
    tuple: Packing._tuple,
    dict: Packing._dict,
    torch.Tensor: Packing._tensor,
    MemoryMappedTensor: Packing._tensor,
    ReadOnlyTensor: Packing._read_only_tensor,
    np.ndarray: Packing._array,
    TensorColumns: Packing._columns,
    TensorDict: Packing._tensordict,
    LazyStackedTensorDict: Packing._tensordict,
    NonTensorStack: Packing._values,
    ValueStack: Packing._values,
    NonTensorData: Packing._shared,
}


def is_plain(value: Any, depth: int = 2) -> bool:
    """Say whether there is nothing to replace in a value, as far as it is ``depth`` containers deep at most.

    Most object columns are text, flat dicts or lists of these, 100,000 of them.
    """
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind is dict:
        if not _ATOMS.issuperset(map(type, value)):
            return False
        value = value.values()
    elif kind is not list and kind is not tuple:
        return False
    if _ATOMS.issuperset(map(type, value)):
        return True
    return depth > 1 and all(is_plain(entry, depth - 1) for entry in value)


def _flat(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


# What pickled batches name. Data written by one version is read by the next as long as these keep their arguments.


def _same(value: Any) -> Any:
    return value


def _tensor(
    arrivals: Arrivals, number: int | None, dtype: str, shape: tuple[int, ...], device: str | None, wants_grad: bool
) -> torch.Tensor:
    return arrivals.tensor(number, getattr(torch, dtype), shape, device, wants_grad=wants_grad)


def _private_tensor(arrivals: Arrivals, number: int | None, dtype: str, shape: tuple[int, ...], *rest: Any) -> Any:
    device, wants_grad = rest
    return arrivals.tensor(number, getattr(torch, dtype), shape, device, wants_grad=wants_grad, private=True)


def _array(arrivals: Arrivals, number: int | None, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    return arrivals.array(number, dtype, shape)


def _objects(cells: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    return column_of_objects(cells).reshape(shape)


def _strided_nested(pieces: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(pieces)


def _tensordict(entries: dict[str, Any], batch_size: tuple[int, ...], device: str | None) -> TensorDict:
    return TensorDict(entries, batch_size=batch_size, device=None if device is None else Arrivals.device_here(device))


def _columns(arrivals: Arrivals, entries: dict[str, Any], num_rows: int, device: str | None) -> TensorColumns:
    columns = {name: arrivals.dense(*entry) if type(entry) is tuple else entry for name, entry in entries.items()}
    return TensorColumns(columns, num_rows, None if device is None else Arrivals.device_here(device))


def _batch(kind: Any, state: dict[str, Any], *columns: Any) -> Any:
    return kind.__kapell_restore__({"batch": _columns(*columns), **state})


def _values(column: np.ndarray) -> ValueStack:
    return ValueStack.of(column)


def _shared(value: Any, batch_size: tuple[int, ...]) -> NonTensorData:
    return NonTensorData(value, batch_size=batch_size)
