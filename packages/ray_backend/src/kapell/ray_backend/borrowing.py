"""Results that are read where they lie: those that are only joined into a new batch, their one copy, or read-only."""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

__all__ = ["borrow_always", "borrowing", "is_borrowable", "load_borrowed", "may_borrow"]

_ATOMS = frozenset({str, bytes, int, float, bool, complex, type(None)})
_ARRIVALS = ("kapell.protocol.arrivals", "Arrivals")
_READ_ONLY = ("kapell.protocol.read_only", "ReadOnlyTensor")
_thread = threading.local()
_process = {"borrows": False}


@contextmanager
def borrowing() -> Generator[None]:
    """Inside, what this thread reads from Ray may be read-only views of the object store."""
    _thread.borrows = True
    try:
        yield
    finally:
        _thread.borrows = False


def borrow_always() -> None:
    """From now on, what this process reads from Ray may be read-only views of the object store."""
    _process["borrows"] = True


def may_borrow() -> bool:
    """Whether this thread is inside `borrowing`, or the process always borrows."""
    return _process["borrows"] or getattr(_thread, "borrows", False)


def is_borrowable(value: Any) -> bool:
    """Whether several such values are joined, by copying every array in them: none lies inside cells or meta."""
    kind = (type(value).__module__, type(value).__name__)
    if kind == ("kapell.protocol.dataproto", "DataProto"):
        return (
            all(map(_is_plain_tensor, value.tensor_columns().values()))
            and all(map(_is_plain_column, value.non_tensor_batch.values()))
            and _is_plain(value.meta_info)
        )
    if kind[0].startswith("tensordict") and kind[1] == "TensorDict":
        return value.batch_dims > 0 and all(map(_is_plain_tensor, value.values()))
    return _is_plain_tensor(value) or (kind == ("numpy", "ndarray") and value.ndim > 0 and not value.dtype.hasobject)


def load_borrowed(head: bytes, buffers: Sequence[Any]) -> Any:
    """The value over ``buffers`` themselves; writing to it raises."""
    return _Borrower(io.BytesIO(head), buffers=buffers).load()


class _Borrower(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return partial(_read_only, found) if (module, name) == _ARRIVALS else found


def _read_only(arrivals: Any, _: bool, *buffers: Any) -> Any:
    return arrivals(True, *buffers)


def _is_plain_tensor(value: Any) -> bool:
    kind = (type(value).__module__, type(value).__name__)
    if kind == _READ_ONLY:  # it is sent as the ordinary tensor that it shows
        return True
    return kind == ("torch", "Tensor") and not value.is_nested and value.device.type == "cpu"


def _is_plain_column(column: Any) -> bool:
    return not column.dtype.hasobject or _ATOMS.issuperset(map(type, column.flat))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return type(value) in _ATOMS
