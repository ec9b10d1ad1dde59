"""Exceptions between processes: each arrives as itself where it can, and always with its text and traceback."""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MemberDescriptorType, TracebackType
from typing import Any

from .errors import KapellError, RemoteError, error_text, mesh_place_of, set_mesh_place

__all__ = ["PackedError", "error_parts", "pack_error", "show_user_frames", "user_frames", "user_traceback"]

_TRACEBACK_NOTE = "worker traceback:"

# Frames that lead from a call to the user's method say nothing to the user.
_INFRASTRUCTURE = ("asyncio", "concurrent.futures", "contextlib", "ray")
_KAPELL = frozenset({"kapell.workergroup", "kapell.ray_backend"})
# Classes with a __reduce__ of their own know better.
_BUILTIN_WAYS = frozenset(kind.__reduce__ for kind in (BaseException, OSError, ImportError, AttributeError))
_OBJECT_ASKED = vars(AttributeError)["obj"]  # the object without the attribute: often the whole worker
_UNSET = object()


class PackedError(KapellError):
    """An exception on its way from a worker: what a backend raises in the process and unpacks at the controller."""

    def __init__(self, payload: bytes | None, stand_in: RemoteError) -> None:
        super().__init__(payload, stand_in)
        self.payload = payload
        self.stand_in = stand_in

    def __str__(self) -> str:
        return str(self.stand_in)

    def unpack(self) -> Exception:
        """The worker's own exception with its traceback as a note, or `RemoteError` when it cannot be rebuilt here."""
        if self.payload is None:
            return self.stand_in
        try:
            error = pickle.loads(self.payload)
        except Exception:  # whatever a class does while it is loaded; the stand-in has all there is to say
            return self.stand_in
        if not isinstance(error, Exception):
            return self.stand_in
        if not any(note.startswith(_TRACEBACK_NOTE) for note in getattr(error, "__notes__", ())):
            error.add_note(f"{_TRACEBACK_NOTE}\n{self.stand_in.traceback_text}")
        return error


class _ErrorPickler(pickle.Pickler):
    """Pickles exceptions without their constructors, which may want other arguments than ``args`` holds."""

    def reducer_override(self, obj: Any) -> Any:
        """As pickle calls it: how an exception is taken apart; ``NotImplemented`` for anything else."""
        return error_parts(obj)


def pack_error(error: BaseException, pickler: Callable[[io.BytesIO], pickle.Pickler] = _ErrorPickler) -> PackedError:
    """Make a worker's exception ready to leave its process; ``SystemExit`` and its like become a `RemoteError`.

    A class with an unusual constructor is rebuilt from its ``args`` and attributes, without calling it; only where
    that gives another exception, by calling it. A backend may bring a ``pickler`` that knows more classes; it takes
    exceptions apart by `error_parts`.
    """
    stand_in = RemoteError(type(error).__name__, error_text(error), user_traceback(error))
    set_mesh_place(stand_in, mesh_place_of(error))
    if not isinstance(error, Exception):
        return PackedError(None, stand_in)
    for kind in (pickler, pickle.Pickler):
        with suppress(Exception):  # whatever the exception's own members raise
            stream = io.BytesIO()
            kind(stream).dump(error)
            back = pickle.loads(stream.getvalue())
            if type(back) is type(error) and error_text(back) == error_text(error):
                return PackedError(stream.getvalue(), stand_in)
    return PackedError(None, stand_in)


def user_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first frame on: what led there inside Kapell is left out."""
    start = trace
    while start is not None:
        module = start.tb_frame.f_globals.get("__name__", "")
        if module.rpartition(".")[0] not in _KAPELL and not module.startswith(_INFRASTRUCTURE):
            return start
        start = start.tb_next
    return trace


def user_traceback(error: BaseException) -> str:
    """The text of an exception with its chain and the user's frames."""
    return "".join(traceback.format_exception(type(error), error, user_frames(error.__traceback__)))


def show_user_frames(error: BaseException) -> None:
    """Cut an exception's traceback to the user's frames."""
    error.__traceback__ = user_frames(error.__traceback__)


def error_parts(obj: Any) -> Any:
    """How a pickler's ``reducer_override`` takes an exception apart; ``NotImplemented`` for anything else."""
    if isinstance(obj, BaseException) and type(obj).__reduce__ in _BUILTIN_WAYS:
        return _restore, (type(obj), obj.args, _members(obj)), obj.__dict__ or None
    return NotImplemented


def _members(error: BaseException) -> dict[str, Any]:
    """What a class in C, such as ``UnicodeDecodeError``, or one with slots keeps beside ``args`` and ``__dict__``."""
    found = [(name, at) for kind in type(error).__mro__ for name, at in vars(kind).items()]
    names = {name for name, at in found if type(at) is MemberDescriptorType and at is not _OBJECT_ASKED}
    return {name: getattr(error, name) for name in sorted(names) if hasattr(error, name)}


def _restore(cls: type[BaseException], args: tuple[Any, ...], members: Mapping[str, Any]) -> BaseException:
    error = cls.__new__(cls, *args)
    error.args = args
    for name, value in members.items():
        if getattr(error, name, _UNSET) is not value:  # to some members in C, None is not the same as unset
            with suppress(AttributeError, TypeError):  # read-only: `__new__` has set it
                setattr(error, name, value)
    return error
