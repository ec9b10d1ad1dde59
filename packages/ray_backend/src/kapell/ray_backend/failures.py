"""A worker's exception on its way out of Ray: as itself also when only its value, not its name, can travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray import cloudpickle
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from kapell.workergroup import LostWorker, PackedError, error_parts, pack_error

from .storing import NO_ROOM

__all__ = ["answer_error", "leaving_error", "lost_worker", "own_error"]

_SHOWN_CHARACTERS = 600  # of what Ray says when it ends a process for its memory: it adds tables of the whole node


def leaving_error(error: BaseException) -> PackedError:
    """What to raise in the worker's process for ``error``.

    Classes of a script or of a test file are known here only by value, so they are sent back by value.
    """
    packed = pack_error(error)
    return packed if packed.payload is not None else pack_error(error, _PicklerByValue)


def own_error(error: RayTaskError) -> Exception:
    """The exception that the worker raised, out of what Ray made of it."""
    cause = error.cause
    if isinstance(cause, PackedError):
        return cause.unpack()
    return cause if isinstance(cause, Exception) else error


def answer_error(error: Exception, node: str, no_room: Callable[[Exception], Exception]) -> Exception:
    """The error of ours for what ``ray.get`` raised instead of a rank's answer; ``no_room`` makes that of a full store.

    The worker's own, or `LostWorker` when its process on ``node`` is gone.
    """
    if isinstance(error, RayTaskError):  # Ray's class for it is that of the worker's error, too: ask first
        error = own_error(error)
    elif isinstance(error, RayActorError | OutOfMemoryError):
        return lost_worker(error, node)
    return no_room(error) if isinstance(error, NO_ROOM) else error


def lost_worker(error: RayError, node: str) -> LostWorker:
    """What Ray knows about the death of a worker's process, whichever of its errors says so."""
    text = str(error).strip()
    return LostWorker(_memory_reason(text) if isinstance(error, OutOfMemoryError) else text, node)


def _memory_reason(text: str) -> str:
    said = " ".join(text.splitlines()[:2])
    said = said if len(said) <= _SHOWN_CHARACTERS else f"{said[:_SHOWN_CHARACTERS]}..."
    return (
        f"out of memory (OOM): Ray's memory monitor ended the process ({said}); run fewer processes on the node or "
        f"smaller batches, or start Ray with a higher RAY_memory_usage_threshold"
    )


class _PicklerByValue(cloudpickle.CloudPickler):
    def reducer_override(self, obj: Any) -> Any:
        parts = error_parts(obj)
        return super().reducer_override(obj) if parts is NotImplemented else parts
