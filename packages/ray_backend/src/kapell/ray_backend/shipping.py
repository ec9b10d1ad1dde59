"""How values travel: pickle protocol 5 with out-of-band buffers through Ray's object store, private on arrival.

A `Shipped` value is pickled as a call that gives the value itself, so whoever reads the reference (a worker's argument,
``ray.get`` in a recipe) gets the value, whose arrays and tensors are its own and writable; or, sent read-only, views of
the store that refuse to be written.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import WeakSet

import ray
from ray import cloudpickle

from kapell.decorators import is_future

from .borrowing import is_borrowable, load_borrowed, may_borrow
from .importing import send_by_value_if_needed
from .storing import put_value

__all__ = ["HoldsReferencesError", "Packed", "Shipped", "pack", "parallel_put", "ship", "shipped", "unpack"]

_MAX_PUT_THREADS = 16  # more threads than this only queue at the object store
# By name: a program, or a worker, that has no tensors need not load torch.
_WIRE = "kapell.protocol.wire"
_STANDINS = "kapell.protocol.packing"
_LIBRARIES = frozenset({"torch", "numpy", "tensordict"})
_BORROWED_BYTES = 1 << 20  # smaller results are copied faster than they are looked at
_PLAIN = (bool, int, float, str, bytes, type(None))


class Packed(NamedTuple):
    """A value as one pickle and the buffers of its arrays and tensors, which are still the sender's memory."""

    head: bytes
    private: bool
    """Whether the buffers are read as they come: the pickle makes private copies by itself, or none are wanted."""
    buffers: list[pickle.PickleBuffer]

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return len(self.head) + sum(buffer.raw().nbytes for buffer in self.buffers)


def pack(value: Any, *, references: bool = False, read_only: bool = False, room: int = 0) -> Packed:
    """Pickle ``value`` without copying its buffers. Classes and functions that workers cannot import go by value.

    The first buffers, as long as there is ``room`` for their bytes, may be in the pickle itself, which is faster where
    they are small. With ``read_only`` its arrays and tensors arrive as views of the buffers that refuse to be written.
    Raises `HoldsReferencesError` for a value with Ray references inside, unless Ray itself is asking (``references``).
    """
    small = getattr(type(value), "__kapell_bytes__", None) if room and not read_only else None
    if small is not None and (head := small(value, room)) is not None:
        return Packed(head, True, [])
    if is_future(value) and not references:  # known before it is half pickled
        raise HoldsReferencesError("a future refers to what lies elsewhere")
    if _WIRE in sys.modules:
        # A whole container at once shares memory that appears twice.
        value = sys.modules[_WIRE].pack(value, read_only=read_only)
    else:
        room = 0  # numpy alone gives views of the pickle, some of them not writable
    stream, buffers = io.BytesIO(), _Apart(room)
    try:
        _QuickPickler(stream, protocol=5, buffer_callback=buffers).dump(value)
    except _UnfamiliarError:
        stream, buffers = io.BytesIO(), _Apart(room)
        pickler = _Pickler(stream, protocol=5, buffer_callback=buffers)
        pickler.references, pickler.read_only = references, read_only
        pickler.dump(value)
    return Packed(stream.getvalue(), read_only or "torch" in sys.modules, buffers)


class _Apart(list[pickle.PickleBuffer]):
    """Collects the buffers that are not kept in the pickle: from the first one on for which there is no room."""

    def __init__(self, room: int) -> None:
        self._room = room

    def __call__(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether pickle keeps the buffer."""
        self._room -= buffer.raw().nbytes
        if self._room >= 0:
            return True
        self.append(buffer)
        return False


def unpack(head: bytes, private: bool, buffers: Sequence[Any], borrowable: bool = False) -> Any:
    """The value, over private copies of ``buffers``; over these themselves where both sides allow it."""
    if borrowable and may_borrow():
        return load_borrowed(head, buffers)
    return pickle.loads(head, buffers=buffers if private else [bytearray(memoryview(buffer)) for buffer in buffers])


class HoldsReferencesError(TypeError):
    """The value has Ray references inside: only Ray itself may pickle it, so that it counts them."""


class Shipped:
    """Pickles as the value inside, by `pack`; private and writable wherever it is read."""

    __slots__ = ("borrowable", "nbytes", "packed")

    def __init__(self, packed: Packed, *, nbytes: int = 0, borrowable: bool = False) -> None:
        self.packed = packed
        self.nbytes = nbytes
        self.borrowable = borrowable

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _arrive, (self.packed.head, self.packed.private, self.borrowable, *self.packed.buffers)


class _WithReferences:
    """As `Shipped`, but packed while Ray pickles it, so that Ray sees the references inside."""

    __slots__ = ("read_only", "value")

    def __init__(self, value: Any, read_only: bool) -> None:
        self.value = value
        self.read_only = read_only

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        packed = pack(self.value, references=True, read_only=self.read_only)
        return _arrive, (packed.head, packed.private, False, *packed.buffers)


def shipped(value: Any, *, read_only: bool = False) -> Any:
    """``value`` ready for Ray: plain scalars as they are, everything else so that it arrives private and writable.

    With ``read_only`` it arrives as views that refuse to be written.
    """
    if type(value) in _PLAIN:
        return value
    try:
        packed = pack(value, read_only=read_only)
    except HoldsReferencesError:
        return _WithReferences(value, read_only)
    return ship(packed, packed.nbytes, value)


def ship(packed: Packed, nbytes: int, value: Any = None) -> Shipped:
    """A packed value ready for Ray; with the ``value`` itself, one that may be read where it lies."""
    return Shipped(packed, nbytes=nbytes, borrowable=nbytes >= _BORROWED_BYTES and is_borrowable(value))


def parallel_put(data_list: Sequence[Any], max_workers: int | None = None) -> list[ray.ObjectRef]:
    """Put values into Ray's object store with several threads; the references keep their order.

    Reading one gives a private, writable value. Raises ``ValueError`` when there is nothing to put, and
    `StoreFullError` when there is no room.
    """
    if len(data_list) == 0:
        raise ValueError("data_list is empty; give at least one value to put")
    threads = min(len(data_list), max_workers or _MAX_PUT_THREADS)
    with ThreadPoolExecutor(threads, thread_name_prefix="parallel-put") as pool:
        return list(pool.map(lambda value: put_value(shipped(value), "a value"), data_list))


def _arrive(head: bytes, private: bool, borrowable: bool, *buffers: Any) -> Any:
    return unpack(head, private, buffers, borrowable)


class _UnfamiliarError(Exception):
    """The value holds something that only cloudpickle may know."""


class _QuickPickler(pickle.Pickler):
    """Takes plain data and stand-ins, of which most values consist, in a third of cloudpickle's time."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is MethodType:
            obj = obj.__self__  # of a class, if it is one of Kapell's own
            kind = type(obj)
        if kind is type or kind is FunctionType or issubclass(kind, type):
            if obj in _by_name:
                return NotImplemented
        elif kind is BuiltinFunctionType or kind.__module__ == _STANDINS:
            return NotImplemented
        raise _UnfamiliarError


class _Pickler(cloudpickle.CloudPickler):
    references = False
    read_only = False

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is FunctionType or issubclass(kind, type):
            return self._definition(obj)
        if kind is ray.ObjectRef and not self.references:
            raise HoldsReferencesError("the value holds Ray references")
        if "torch" in sys.modules and kind.__module__.partition(".")[0] in _LIBRARIES:
            standin = import_module(_WIRE).pack(obj, read_only=self.read_only)
            if standin is not obj:
                return standin.__reduce_ex__(5)
        return NotImplemented

    def _definition(self, obj: Any) -> Any:
        """A function or class: by name where workers can import it, else by value."""
        if obj in _by_name:
            return NotImplemented
        send_by_value_if_needed(getattr(obj, "__module__", None))
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented:
            _by_name.add(obj)
        return reduced


# Classes and functions. cloudpickle looks each of them up anew, which takes longer than all the rest of a small value.
_by_name: WeakSet[Any] = WeakSet()
