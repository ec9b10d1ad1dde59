"""One rank's share of a call, and its answer: strings of bytes, and what Ray itself must see beside them.

Ray passes bytes on as they are. Anything else, in or out, costs it more than all of Kapell's own work, and so does any
argument beside none: a call without arguments is known by the name of its task alone.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ray

from kapell.decorators import is_future
from kapell.workergroup import RankCall

from .shipping import HoldsReferencesError, Packed, pack, ship, shipped, unpack
from .storing import put_value

__all__ = [
    "Inline",
    "OpenedCall",
    "PackedCall",
    "Stored",
    "goes_by_name",
    "name_of",
    "opened_answer",
    "opened_call",
    "opened_name",
    "pack_argument",
    "packed_answer",
    "packed_call",
]

_PIECE_BYTES = 96_000  # Ray would put a longer argument into its store, for each rank anew
_SMALL_BYTES = 64 * 1024  # goes in the call however many ranks read it
_INLINE_BYTES = 4 * _PIECE_BYTES  # of all ranks; it takes half as long as the store at 100 kB, and as long at 700 kB
_PLAIN = frozenset({bool, int, float, str, type(None)})
_SHORT = 1024  # characters of text that goes as it is
_APART = ...


class Inline:
    """A small value, pickled once, that rides in the call itself."""

    __slots__ = ("data", "nbytes")

    def __init__(self, packed: Packed, nbytes: int) -> None:
        self.data = _in_one(packed)
        self.nbytes = nbytes


class Stored(NamedTuple):
    """A large value in Ray's object store, put there once."""

    ref: ray.ObjectRef
    share: int
    """Its bytes there, divided among those who read it."""


class PackedCall(NamedTuple):
    """A call as it goes to an actor."""

    head: bytes | int
    """All of it as bytes but what lies apart; where that is long, the number of pieces that come first in ``apart``."""
    apart: list[Any]
    """What Ray itself must see."""
    stored: int
    """Bytes that were put into Ray's object store for it; of what several ranks read, its part."""


def pack_argument(value: Any, *, num_readers: int = 1, read_only: bool = False) -> Any:
    """An argument as it goes into a call: serialized here, once, however many ranks read it."""
    if type(value) in _PLAIN and (type(value) is not str or len(value) < _SHORT):
        return value
    if isinstance(value, ray.ObjectRef) or is_future(value):
        return value
    try:
        packed = pack(value, read_only=read_only, room=_SMALL_BYTES)
    except HoldsReferencesError:
        return shipped(value, read_only=read_only)
    nbytes = packed.nbytes
    if nbytes <= _SMALL_BYTES or nbytes * num_readers <= _INLINE_BYTES:
        return Inline(packed, nbytes)
    return Stored(put_value(ship(packed, nbytes), "an argument"), nbytes // num_readers)


def name_of(call: RankCall) -> str:
    """What Ray calls the task, in its dashboard and in the list of processes: the method, behind its role if any."""
    return f"{call.target}.{call.method}" if call.target else call.method


def goes_by_name(call: RankCall) -> bool:
    """Whether the name says all that `opened_name` does not know otherwise."""
    return call.direct and call.wanted and not (call.args or call.kwargs or call.trace or call.by_reference)


def opened_name(name: str) -> tuple[str, str]:
    """Target and method of a call that `name_of` named."""
    target, _, method = name.rpartition(".")
    return target, method


def packed_call(call: RankCall) -> PackedCall:
    """A call whose arguments `pack_argument` gave."""
    entries: list[Any] = []
    apart: list[Any] = []
    stored = 0
    for value in (*call.args, *call.kwargs.values()):
        if type(value) in _PLAIN:
            entries.append(value)
        elif type(value) is Inline:
            entries.append(value.data)
        elif type(value) is Stored:
            entries.append(_APART)
            apart.append(value.ref)
            stored += value.share
        else:
            entries.append(_APART)
            apart.append(value)
    head = pickle.dumps((call.direct, call.method, call.run_options(), tuple(call.kwargs), entries), protocol=5)
    if len(head) <= _PIECE_BYTES:
        return PackedCall(head, apart, stored)
    pieces = [head[start : start + _PIECE_BYTES] for start in range(0, len(head), _PIECE_BYTES)]
    return PackedCall(len(pieces), [*pieces, *apart], stored)


class OpenedCall(NamedTuple):
    """A call as the worker runs it."""

    direct: bool
    method: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    options: dict[str, Any]
    """Those of `CallRunner.run`."""


def opened_call(head: bytes | int, apart: Sequence[Any]) -> OpenedCall:
    """A call that `packed_call` packed, when Ray has opened what lies apart."""
    if isinstance(head, int):
        head, apart = b"".join(apart[:head]), apart[head:]
    direct, method, options, names, entries = pickle.loads(head)
    beside = iter(apart)
    values = [_opened(entry, beside) for entry in entries]
    if not names:
        return OpenedCall(direct, method, values, {}, options)
    first_named = len(values) - len(names)
    named = dict(zip(names, values[first_named:], strict=True))
    return OpenedCall(direct, method, values[:first_named], named, options)


def packed_answer(value: Any) -> Any:
    """An answer that `opened_answer` reads: a pickle where it is small, or is itself bytes."""
    if type(value) in _PLAIN:
        return value
    try:
        packed = pack(value, room=_SMALL_BYTES)
    except HoldsReferencesError:
        return shipped(value)
    nbytes = packed.nbytes
    if nbytes > _PIECE_BYTES and type(value) is not bytes:  # shipped, they would look like a pickle when Ray opens them
        return ship(packed, nbytes, value)
    return _in_one(packed)


def opened_answer(answer: Any) -> Any:
    """The value of an answer that `packed_answer` gave and Ray has opened."""
    if type(answer) is not bytes:
        return answer
    return pickle.loads(answer)


class _Whole:
    """Pickles as the value of a pickle with buffers apart."""

    __slots__ = ("packed",)

    def __init__(self, packed: Packed) -> None:
        self.packed = packed

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (
            self.packed.head,
            self.packed.private,
            [buffer.raw().tobytes() for buffer in self.packed.buffers],
        )


def _in_one(packed: Packed) -> bytes:
    """What ``pickle.loads`` reads by itself."""
    return pickle.dumps(_Whole(packed), protocol=5) if packed.buffers else packed.head


def _opened(entry: Any, apart: Iterator[Any]) -> Any:
    if entry is _APART:
        return next(apart)
    return pickle.loads(entry) if type(entry) is bytes else entry
