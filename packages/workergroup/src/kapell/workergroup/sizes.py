"""How many bytes a value has, as far as its type says it; cheap enough for every argument of every call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kapell.decorators import is_future, nbytes_of, splitter_of

__all__ = ["size_of"]

_RECORD = 8  # entries; more of them are taken to be alike
_FIXED = {bool: 1, int: 8, float: 8, complex: 16, type(None): 0}


def size_of(value: Any, depth: int = 3) -> int:
    """Bytes of a value: exact for arrays, tensors and batches of them, a guess for other things.

    A list, tuple or dict of few entries counts as all of them, a longer one as its first entry times its length. What
    lies more than ``depth`` of them deep, or says nothing, as most futures, counts as 0.

    >>> size_of([1] * 1000), size_of({"name": "text"}), size_of((1, "text"))
    (8000, 8, 12)
    """
    kind = type(value)
    if kind is list or kind is tuple:
        if len(value) <= _RECORD:
            return _sum_of(value, depth)
        first = value[0]
        return len(value) * (_FIXED.get(type(first)) or (size_of(first, depth - 1) if depth else 0))
    if kind in _FIXED:
        return _FIXED[kind]
    weigh = _WEIGHERS.get(kind)
    if weigh is not None:
        return weigh(value)
    if kind is str or kind is bytes or kind is bytearray:
        return len(value)
    if kind is dict:
        if len(value) <= _RECORD:
            return _sum_of(value, depth) + _sum_of(value.values(), depth)
        key, entry = next(iter(value.items()))
        return len(value) * (size_of(key, depth - 1) + size_of(entry, depth - 1)) if depth else 0
    weigh = _WEIGHERS[kind] = _weigher_of(value)
    return weigh(value)


def _sum_of(entries: Iterable[Any], depth: int) -> int:
    total = 0
    for entry in entries:
        # Most entries are numbers or text: a call for each would cost more than the sum.
        kind = type(entry)
        if kind is str:
            total += len(entry)
        else:
            total += _FIXED.get(kind) or (size_of(entry, depth - 1) if depth else 0)
    return total


def _weigher_of(value: Any) -> Callable[[Any], int]:
    if is_future(value) and not hasattr(type(value), "nbytes"):
        return _nothing
    splitter = splitter_of(value)
    return nbytes_of if splitter is None or splitter.nbytes is None else splitter.nbytes


def _nothing(value: Any) -> int:
    return 0


_WEIGHERS: dict[type, Callable[[Any], int]] = {}  # by type, as the first value of it told
