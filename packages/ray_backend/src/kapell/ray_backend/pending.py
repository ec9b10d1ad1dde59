"""What a non-blocking call on Ray returns: Kapell's future, which also serves code written for verl."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib import import_module
from typing import Any, TypeVar

from kapell.decorators import Reduction
from kapell.workergroup import CallRecord, PendingCall

from .answers import Answers
from .borrowing import borrowing

__all__ = ["BorrowingCall", "RayPendingCall", "ResultElsewhere", "SharedCall", "joins_rows", "pending_call"]

ResultT = TypeVar("ResultT")


class BorrowingCall(PendingCall[ResultT]):
    """Reads results that are only joined into a new value where they lie, and joins them at once."""

    def _fetch_all(self, deadline: float) -> None:
        # With one result alone there is nothing to join: it is handed out as it is.
        joins = joins_rows(self.plan) and len(self.plan.collect_ranks) > 1
        with borrowing() if joins else nullcontext():
            super()._fetch_all(deadline)


class SharedCall(BorrowingCall[ResultT]):
    """A call whose answers others may read, too: they keep references to them, and travel with these."""

    def _expect(self, handles: Mapping[int, Any], record: CallRecord) -> None:
        super()._expect(handles, record)
        workers: Any = self._route.runtime.workers
        refs = {rank: handles[rank].ref for rank in map(self._route.ranks.__getitem__, self._plan.collect_ranks)}
        self._answers: Answers = workers.answers(self._route.role, self._method, refs, len(handles))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return ResultElsewhere, (self._answers, self._plan.collector)


class RayPendingCall(SharedCall[ResultT], list):
    """A call under way. ``get``, ``await`` and ``as_completed`` work as on every backend.

    It also is the list of references to the collected ranks' results, so that ``ray.get(pending)`` gives these as a
    list. Given to a method of another group, the references travel: the data goes from worker to worker.
    """

    def _expect(self, handles: Mapping[int, Any], record: CallRecord) -> None:
        super()._expect(handles, record)
        self[:] = self._answers.givers

    @property
    def num_rows(self) -> int | None:
        """None, although it is a list: as a batch, its length is not known yet."""
        return None

    # As a future it is itself and no other, however its references compare.
    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __ne__ = object.__ne__


def pending_call(route: Any, method: str, plan: Any, handles: Any, record: Any, **options: Any) -> PendingCall[Any]:
    """The kind of future that fits the call: one that is a batch where ranks' rows are joined, else a list."""
    # Only who has loaded kapell.protocol, and with it torch, can ask for a DataProtoFuture.
    if options["direct"]:
        kind = BorrowingCall
    elif joins_rows(plan) and "kapell.protocol" in sys.modules:
        kind = import_module("kapell.ray_backend.pending_batch").RayPendingBatch
    else:
        kind = RayPendingCall
    return kind(route, method, plan, handles, record, **options)


class ResultElsewhere:
    """A pending call in a process that did not make it: fetches the ranks' results and collects them there."""

    __kapell_future__ = True

    def __init__(self, answers: Answers, collector: Callable[[list[Any]], Any]) -> None:
        self._answers = answers
        self._collector = collector

    def get(self, timeout: float | None = None) -> Any:
        """The collected result; raises as `Answers.get` does."""
        refs = list(self._answers.givers)
        joins = len(refs) > 1 and _joins_rows(self._collector)
        with borrowing() if joins else nullcontext():
            results = self._answers.get(refs, timeout)
        return self._collector(results)

    def __reduce__(self) -> tuple[Any, ...]:
        return ResultElsewhere, (self._answers, self._collector)


def joins_rows(plan: Any) -> bool:
    """Whether the call joins the ranks' rows."""
    return _joins_rows(plan.collector)


def _joins_rows(collector: Any) -> bool:
    return getattr(collector, "reduction", None) is Reduction.CONCAT
