"""A worker's exception on its way out of Ray: as itself also when only its value, not its name, can travel."""

from __future__ import annotations

import io
import pickle
from typing import Any

from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError

from kapell.workergroup import LostWorker, PackedError, pack_error

__all__ = ["leaving_error", "lost_worker", "own_error"]


def leaving_error(error: BaseException) -> PackedError:
    """What to raise in the worker's process for ``error``.

    Classes of a script or of a test file are known here only by value, so they are sent back by value.
    """
    packed = pack_error(error)
    if packed.payload is not None or not isinstance(error, Exception):
        return packed
    try:
        payload = _by_value(error)
        back = pickle.loads(payload)
        same = type(back) is type(error) and str(back) == str(error)
    except Exception:  # whatever the exception's own members raise; its text travels in any case
        return packed
    return PackedError(payload, packed.stand_in) if same else packed


def own_error(error: RayTaskError) -> Exception:
    """The exception that the worker raised, out of what Ray made of it."""
    cause = error.cause
    if isinstance(cause, PackedError):
        return cause.unpack()
    return cause if isinstance(cause, Exception) else error


def lost_worker(error: RayError, node: str) -> LostWorker:
    """What Ray knows about the death of a worker's process."""
    return LostWorker(str(error).strip(), node)


class _ErrorPickler(cloudpickle.CloudPickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BaseException) and type(obj).__reduce__ is BaseException.__reduce__:
            return _restore, (type(obj), obj.args), obj.__dict__ or None
        return super().reducer_override(obj)


def _by_value(error: Exception) -> bytes:
    stream = io.BytesIO()
    _ErrorPickler(stream).dump(error)
    return stream.getvalue()


def _restore(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Make the exception without its constructor, which may want other arguments than ``args`` holds."""
    error = cls.__new__(cls, *args)
    error.args = args
    return error
