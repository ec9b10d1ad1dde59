"""What calls by reference leave in Ray's object store: it is the worker's as long as somebody refers to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from kapell.workergroup import KapellError

from .borrowing import borrowing
from .session import check_cluster, check_session, this_session
from .shipping import shipped
from .storing import put_value

__all__ = ["KeptInRay", "LostBatchError"]

_WHAT = "a batch by reference"


class LostBatchError(KapellError):
    """Columns of a batch by reference are gone, as a rule with the worker's process that had made them."""

    def __init__(self, keeper: str, reason: str) -> None:
        super().__init__(keeper, reason)
        self.keeper = keeper
        """The worker."""
        self.reason = reason
        """The name of Ray's error."""

    def __str__(self) -> str:
        return (
            f"columns that stayed with {self.keeper} are lost ({self.reason}): they go with its process; make them "
            "anew, and get() what must outlive the worker"
        )


class _Kept(NamedTuple):
    ref: ray.ObjectRef
    keeper: str


@dataclass(frozen=True)
class KeptInRay:
    """Ray's object store, as `kapell.protocol.Store` describes one. What it gives is to be read only: it is shared."""

    keeper: str = field(compare=False)
    """The worker that puts values there."""
    origin: tuple[str, str] | None = field(default_factory=this_session, compare=False)
    """The session of Ray in which it does."""
    session: tuple[str, str] | None = field(default_factory=this_session)
    """The session in which they are read."""

    def put(self, value: Any) -> _Kept:
        """Keep a value. Raises `StoreFullError` when there is no room."""
        return _Kept(put_value(shipped(value), _WHAT), self.keeper)

    def get(self, refs: Sequence[_Kept], *, timeout: float | None = None) -> list[Any]:
        """The values.

        Raises `LostBatchError`, ``TimeoutError`` after ``timeout`` seconds, and `EndedSessionError`.
        """
        self._check()
        try:
            with borrowing():
                return ray.get([kept.ref for kept in refs], timeout=timeout)
        except GetTimeoutError:
            raise TimeoutError(f"{_WHAT} was not here after {timeout} s") from None
        except ObjectLostError as error:
            lost = next((kept for kept in refs if kept.ref.hex() == error.object_ref_hex), refs[0])
            raise LostBatchError(lost.keeper, type(error).__name__) from None

    def wait(self, refs: Sequence[_Kept], *, timeout: float | None = None) -> tuple[list[_Kept], list[_Kept]]:
        """All of them are there."""
        return list(refs), []

    def _check(self) -> None:
        check_session(self.session, _WHAT)
        check_cluster(self.origin, _WHAT)

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptInRay, (self.keeper, self.origin)
