"""One rank's share of a call, and its answer: strings of bytes, and what Ray itself must see beside them.

Ray passes bytes on as they are. Anything else, in or out, costs it more than all of Kapell's own work, and so does any
argument beside none: a call without arguments is known by the name of its task alone.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray

from kapell.decorators import is_future
from kapell.workergroup import RankCall

from .shipping import HoldsReferencesError, Packed, pack, ship, shipped, unpack
from .storing import put_value

__all__ = [
    "Inline",
    "goes_by_name",
    "name_of",
    "opened_answer",
    "opened_call",
    "opened_name",
    "pack_argument",
    "packed_answer",
    "packed_call",
]

_INLINE_BYTES = 64 * 1024  # below Ray's own limit of 100 kB, from where on it would put the argument for each rank anew
_PLAIN = frozenset({bool, int, float, str, type(None)})
_SHORT = 1024  # characters of text that goes as it is
_APART = ...
_APART_PACKED = b""


class Inline:
    """A small value, packed once, that rides in the call itself."""

    __slots__ = ("nbytes", "parts")

    def __init__(self, packed: Packed, nbytes: int) -> None:
        self.parts = _parts(packed)
        self.nbytes = nbytes


def pack_argument(value: Any, *, read_only: bool = False) -> Any:
    """An argument as it goes into a call: serialized here, once, however many ranks read it."""
    if type(value) in _PLAIN and (type(value) is not str or len(value) < _SHORT):
        return value
    if isinstance(value, ray.ObjectRef) or is_future(value):
        return value
    try:
        packed = pack(value, read_only=read_only, room=_INLINE_BYTES)
    except HoldsReferencesError:
        return shipped(value, read_only=read_only)
    nbytes = packed.nbytes
    return Inline(packed, nbytes) if nbytes <= _INLINE_BYTES else put_value(ship(packed, nbytes), "an argument")


def name_of(call: RankCall) -> str:
    """What Ray calls the task, in its dashboard and in the list of processes: the method, behind its role if any."""
    return f"{call.target}.{call.method}" if call.target else call.method


def goes_by_name(call: RankCall) -> bool:
    """Whether the name says all that `opened_name` does not know otherwise."""
    return call.direct and call.wanted and not (call.args or call.kwargs or call.trace)


def opened_name(name: str) -> tuple[str, str]:
    """Target and method of a call that `name_of` named."""
    target, _, method = name.rpartition(".")
    return target, method


def packed_call(call: RankCall) -> tuple[bytes, list[Any]]:
    """A call whose arguments `pack_argument` gave, as bytes, and the arguments that go beside it."""
    entries: list[Any] = []
    apart: list[Any] = []
    room = _INLINE_BYTES
    for value in (*call.args, *call.kwargs.values()):
        if type(value) in _PLAIN:
            entries.append(value)
        elif type(value) is not Inline:
            entries.append(_APART)
            apart.append(value)
        elif value.nbytes <= room:
            entries.append(value.parts)
            room -= value.nbytes
        else:
            entries.append(_APART_PACKED)
            apart.append(pickle.dumps(value.parts, protocol=5))
    facts = (call.direct, call.method, call.target, call.wanted, call.number, call.trace, tuple(call.kwargs), entries)
    return pickle.dumps(facts, protocol=5), apart


def opened_call(
    head: bytes, apart: Sequence[Any]
) -> tuple[bool, str, Sequence[Any], Mapping[str, Any], dict[str, Any]]:
    """Whether it is direct, method, arguments, keyword arguments, and the options of `CallRunner.run`."""
    direct, method, target, wanted, number, trace, names, entries = pickle.loads(head)
    beside = iter(apart)
    values = [_opened(entry, beside) for entry in entries]
    options = {"target": target, "wanted": wanted, "number": number, "trace": trace}
    if not names:
        return direct, method, values, {}, options
    first_named = len(values) - len(names)
    return direct, method, values[:first_named], dict(zip(names, values[first_named:], strict=True)), options


def packed_answer(value: Any) -> Any:
    """An answer that `opened_answer` reads: as bytes where it is small."""
    if type(value) in _PLAIN:
        return value
    try:
        packed = pack(value, room=_INLINE_BYTES)
    except HoldsReferencesError:
        return shipped(value)
    nbytes = packed.nbytes
    if nbytes > _INLINE_BYTES:
        return ship(packed, nbytes, value)
    return pickle.dumps(_parts(packed), protocol=5)


def opened_answer(answer: Any) -> Any:
    """The value of an answer that `packed_answer` gave and Ray has opened."""
    if type(answer) is not bytes:
        return answer
    head, private, *buffers = pickle.loads(answer)
    return unpack(head, private, buffers)


def _parts(packed: Packed) -> tuple[Any, ...]:
    return packed.head, packed.private, *(buffer.raw().tobytes() for buffer in packed.buffers)


def _opened(entry: Any, apart: Iterator[Any]) -> Any:
    if entry is _APART:
        return next(apart)
    if entry == _APART_PACKED and type(entry) is bytes:
        entry = pickle.loads(next(apart))
    return unpack(entry[0], entry[1], entry[2:]) if type(entry) is tuple else entry
