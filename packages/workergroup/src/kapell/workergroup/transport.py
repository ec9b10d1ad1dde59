"""Exceptions between processes: each arrives as itself where it can, and always with its text and traceback."""

from __future__ import annotations

import io
import pickle
import traceback
from types import TracebackType
from typing import Any

from .errors import KapellError, RemoteError, error_text, mesh_place_of, set_mesh_place

__all__ = ["PackedError", "pack_error", "show_user_frames", "user_frames", "user_traceback"]

_TRACEBACK_NOTE = "worker traceback:"

# Frames that lead from a call to the user's method say nothing to the user.
_INFRASTRUCTURE = ("asyncio", "concurrent.futures", "contextlib", "ray")
_KAPELL = frozenset({"kapell.workergroup", "kapell.ray_backend"})


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


def pack_error(error: BaseException) -> PackedError:
    """Make a worker's exception ready to leave its process; ``SystemExit`` and its like become a `RemoteError`.

    A class with an unusual constructor is rebuilt from its ``args`` and attributes, without calling it.
    """
    stand_in = RemoteError(type(error).__name__, error_text(error), user_traceback(error))
    set_mesh_place(stand_in, mesh_place_of(error))
    if not isinstance(error, Exception):
        return PackedError(None, stand_in)
    try:
        payload = _dumps(error)
        back = pickle.loads(payload)
        same = type(back) is type(error) and error_text(back) == error_text(error)
    except Exception:  # whatever the exception's own members raise
        return PackedError(None, stand_in)
    return PackedError(payload if same else None, stand_in)


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


class _ErrorPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BaseException) and type(obj).__reduce__ is BaseException.__reduce__:
            return _restore, (type(obj), obj.args), obj.__dict__ or None
        return NotImplemented


def _dumps(error: Exception) -> bytes:
    stream = io.BytesIO()
    _ErrorPickler(stream).dump(error)
    return stream.getvalue()


def _restore(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    error = cls.__new__(cls, *args)
    error.args = args
    return error
