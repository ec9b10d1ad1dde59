"""Copies of arguments and results as if they had travelled to another process, at the price of one memory copy."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

from kapell.decorators import is_future

__all__ = ["isolate"]

_IMMUTABLE = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type, FunctionType, BuiltinFunctionType, range, slice}
)


def isolate(value: Any) -> Any:
    """A private copy of ``value``: writing to it changes nobody else's data.

    Tensors and arrays are copied directly, and so is what says itself how: a type's ``__kapell_private__(isolate)``
    gives the copy. Everything else goes through pickle protocol 5, with out-of-band buffers copied once. What pickle
    refuses, such as a closure, is copied as `copy.deepcopy` does it.
    """
    kind = type(value)
    if kind is list:
        if _IMMUTABLE.issuperset(map(type, value)):
            return value.copy()
    elif kind in _IMMUTABLE:
        return value
    elif kind is tuple:
        if _IMMUTABLE.issuperset(map(type, value)):
            return value
    elif kind is dict:
        if _IMMUTABLE.issuperset(map(type, value.values())):
            return dict(value)
    elif is_future(value):
        return value
    if copier := _copier(kind):
        return copier(value)
    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    pickler = _Pickler(stream, buffers)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return copy.deepcopy(value)
    stream.seek(0)
    return _Unpickler(stream, [bytearray(buffer.raw()) for buffer in buffers], pickler.copies).load()


class _Pickler(pickle.Pickler):
    """Takes tensors and arrays out of the stream: each becomes a direct copy, made once even when it appears twice."""

    def __init__(self, stream: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=buffers.append)
        self.copies: list[Any] = []
        self._seen: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        copier = _copier(type(obj))
        if copier is None:
            return None
        index = self._seen.get(id(obj))
        if index is None:
            index = self._seen[id(obj)] = len(self.copies)
            self.copies.append(copier(obj))
        return index


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, buffers: list[bytearray], copies: list[Any]) -> None:
        super().__init__(stream, buffers=buffers)
        self._copies = copies

    def persistent_load(self, pid: int) -> Any:
        return self._copies[pid]


def _copy_tensor(tensor: Any) -> Any:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _copy_array(array: Any) -> Any:
    if array.dtype != object:
        return copy.deepcopy(array) if array.dtype.hasobject else array.copy()
    # It holds references: its cells must be copied too. Not by an assignment, which would look into them.
    cells = isolate(list(array.flat))
    return sys.modules["numpy"].fromiter(cells, dtype=object, count=len(cells)).reshape(array.shape)


def _copy_itself(value: Any) -> Any:
    return value.__kapell_private__(isolate)


# By name, since this package imports neither torch nor numpy.
_COPIERS: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("torch", "Tensor"): _copy_tensor,
    ("numpy", "ndarray"): _copy_array,
}
_BY_TYPE: dict[type, Callable[[Any], Any] | None] = {}


def _copier(kind: type) -> Callable[[Any], Any] | None:
    try:
        return _BY_TYPE[kind]
    except KeyError:
        by_itself = _copy_itself if hasattr(kind, "__kapell_private__") else None
        copier = _BY_TYPE[kind] = _COPIERS.get((kind.__module__, kind.__name__), by_itself)
        return copier
