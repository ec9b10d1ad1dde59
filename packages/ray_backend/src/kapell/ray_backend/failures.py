"""A worker's exception on its way to the controller: never lost, whatever it holds."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

from ray import cloudpickle

from kapell.workergroup import RemoteError

__all__ = ["RemoteFailure"]


class RemoteFailure(Exception):  # noqa: N818 - what Ray carries from a worker; callers get the exception inside
    """Raised inside the worker's process in place of the method's own exception, which it holds as text and, if it can
    be pickled, as itself.
    """

    def __init__(
        self, type_name: str, message: str, traceback_text: str, pickled: bytes | None, cause: Any = None
    ) -> None:
        super().__init__(type_name, message, traceback_text, pickled, cause)
        self.type_name = type_name
        self.message = message
        self.traceback_text = traceback_text
        self.pickled = pickled
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}\n{self.traceback_text}"

    @classmethod
    def of(cls, error: BaseException) -> RemoteFailure:
        """Pack the exception with the traceback of its whole chain."""
        return cls._pack(error, "".join(traceback.format_exception(error)))

    @classmethod
    def _pack(cls, error: BaseException, text: str) -> RemoteFailure:
        try:
            pickled = cloudpickle.dumps(error)
        except Exception:  # a lock, a socket, a generator: the text must do
            pickled = None
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        packed_cause = None if cause is None else cls._pack(cause, "")
        return cls(type(error).__name__, _text_of(error), text, pickled, packed_cause)

    def restore(self) -> Exception:
        """The worker's exception with its cause and, as a note, its traceback; `RemoteError` when that fails."""
        error = self._rebuilt()
        if error is None:
            error = RemoteError(self.type_name, self.message, self.traceback_text)
        elif self.traceback_text:
            error.add_note(f"\nTraceback in the worker:\n{self.traceback_text.rstrip()}")
        if self.cause is not None:
            error.__cause__ = self.cause.restore()
        return error

    def _rebuilt(self) -> Exception | None:
        if self.pickled is None:
            return None
        try:
            error = pickle.loads(self.pickled)
            same = type(error).__name__ == self.type_name and _text_of(error) == self.message
        except Exception:  # such as an __init__ that does not take what args holds
            return None
        # SystemExit and its like ended the worker's call, they must not end the controller.
        return error if same and isinstance(error, Exception) else None


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # a faulty __str__ must not hide the error
        return f"<no message: its __str__ raised {type(broken).__name__}>"
