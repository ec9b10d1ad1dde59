"""What a non-blocking call returns whose ranks' rows are joined into a batch: a pending call and a `DataProtoFuture`.

Apart from `pending`, since `kapell.protocol` brings torch, which not every program on Ray needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray

from kapell.decorators import nbytes_of
from kapell.protocol import DataProtoFuture
from kapell.workergroup import CallRecord

from .borrowing import borrowing
from .pending import BorrowingCall, ResultElsewhere, references
from .session import check_session, this_session
from .shipping import shipped
from .storing import put_value

__all__ = ["RayPendingBatch", "RayStore"]

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class RayStore:
    """Ray's object store, as `DataProtoFuture` uses one. What it gives is private and writable.

    Where what is made of the values is a copy in any case (``copied_anyway``), they are read where they lie.
    """

    copied_anyway: bool = False
    record: CallRecord | None = field(default=None, compare=False, repr=False)
    """Where the controller notes what it fetches; it stays there when the store travels."""
    session: tuple[str, str] | None = field(default_factory=this_session, compare=False, repr=False)
    """The session of Ray that the references are of."""

    def put(self, value: Any) -> ray.ObjectRef:
        """Keep a value and give a reference to it."""
        return put_value(shipped(value), "a value")

    def get(self, refs: Sequence[ray.ObjectRef], *, timeout: float | None = None) -> list[Any]:
        """Give the values in order. Raises a TimeoutError after ``timeout`` seconds."""
        self._check_session()
        with borrowing() if self.copied_anyway else nullcontext():
            values = ray.get(list(refs), timeout=timeout)
        if self.record is not None:
            self.record.fetched_apart += sum(map(nbytes_of, values))
        return values

    def wait(
        self, refs: Sequence[ray.ObjectRef], *, timeout: float | None = None
    ) -> tuple[list[ray.ObjectRef], list[ray.ObjectRef]]:
        """Wait until all are there or the time is over; give those that are there and those that are not."""
        self._check_session()
        # Waiting alone brings nothing to this node: a future that is looked at here may be read elsewhere.
        return ray.wait(list(refs), num_returns=len(refs), timeout=timeout, fetch_local=False) if refs else ([], [])

    def _check_session(self) -> None:
        check_session(self.session, "a future")

    def __reduce__(self) -> tuple[type[RayStore], tuple[bool]]:
        return RayStore, (self.copied_anyway,)


class RayPendingBatch(BorrowingCall[ResultT], DataProtoFuture):
    """A call under way that makes a batch. Cutting it is bookkeeping; each part fetches its rows where it is used."""

    def __init__(self, route: Any, method: str, plan: Any, handles: Any, record: Any, **options: Any) -> None:
        self._refs = references(route, plan, handles)
        self._session = route.runtime.workers.session
        BorrowingCall.__init__(self, route, method, plan, handles, record, **options)

    def get(self, timeout: float | None = None, *, columns: Sequence[str] | None = None) -> Any:
        """The joined batch, or only the named columns of it; see `PendingCall.get` for what it raises."""
        return BorrowingCall.get(self, timeout) if columns is None else self._future().get(timeout, columns=columns)

    @property
    def futures(self) -> tuple[ray.ObjectRef, ...]:
        """References to the collected ranks' results."""
        return tuple(self._refs)

    @property
    def num_rows(self) -> int | None:
        """None: a method may return other rows than it was given."""
        return None

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Cut into exactly ``chunks`` parts, which are cut where they are used."""
        return self._future(cut=True).chunk(chunks)

    def _future(self, *, cut: bool = False) -> DataProtoFuture:
        # One result alone is not joined: only what is cut out of it is a copy.
        store = RayStore(cut or len(self._refs) > 1, self._record, self._session)
        return DataProtoFuture(self._refs, store, collect_fn=self.plan.collector)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        check_session(self._session, f"call {self.label}")
        return ResultElsewhere, (self._refs, self.plan.collector)
