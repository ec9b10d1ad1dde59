"""What a non-blocking call on Ray returns: Kapell's future, which also serves code written for verl."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any, TypeVar

import ray

from kapell.decorators import Reduction
from kapell.workergroup import PendingCall

from .borrowing import borrowing
from .session import check_session, this_session

__all__ = ["BorrowingCall", "RayPendingCall", "ResultElsewhere", "joins_rows", "pending_call", "references"]

ResultT = TypeVar("ResultT")


class BorrowingCall(PendingCall[ResultT]):
    """Reads results that are only joined into a new value where they lie, and joins them at once."""

    def _fetch_all(self, deadline: float) -> None:
        # With one result alone there is nothing to join: it is handed out as it is.
        joins = joins_rows(self.plan) and len(self.plan.collect_ranks) > 1
        with borrowing() if joins else nullcontext():
            super()._fetch_all(deadline)


class RayPendingCall(BorrowingCall[ResultT], list):
    """A call under way. ``get``, ``await`` and ``as_completed`` work as on every backend.

    It also is the list of references to the collected ranks' results, so that ``ray.get(pending)`` gives these as a
    list. Given to a method of another group, the references travel: the data goes from worker to worker.
    """

    def __init__(self, route: Any, method: str, plan: Any, handles: Any, record: Any, **options: Any) -> None:
        list.__init__(self, references(route, plan, handles))
        self._session = route.runtime.workers.session
        BorrowingCall.__init__(self, route, method, plan, handles, record, **options)

    @property
    def num_rows(self) -> int | None:
        """None, although it is a list: as a batch, its length is not known yet."""
        return None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        check_session(self._session, f"call {self.label}")
        return ResultElsewhere, (list(self), self.plan.collector)

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

    def __init__(self, refs: Sequence[ray.ObjectRef], collector: Callable[[list[Any]], Any]) -> None:
        self._refs = list(refs)
        self._collector = collector
        self._session = this_session()

    def get(self, timeout: float | None = None) -> Any:
        """The collected result. Raises what the call raised, or ``ray.exceptions.GetTimeoutError``."""
        check_session(self._session, "a future")
        joins = len(self._refs) > 1 and _joins_rows(self._collector)
        with borrowing() if joins else nullcontext():
            results = ray.get(self._refs, timeout=timeout)
        return self._collector(results)

    def __reduce__(self) -> tuple[Any, ...]:
        check_session(self._session, "a future")
        return ResultElsewhere, (self._refs, self._collector)


def joins_rows(plan: Any) -> bool:
    """Whether the call joins the ranks' rows."""
    return _joins_rows(plan.collector)


def _joins_rows(collector: Any) -> bool:
    return getattr(collector, "reduction", None) is Reduction.CONCAT


def references(route: Any, plan: Any, handles: Any) -> list[ray.ObjectRef]:
    """The references to the results that a call collects, in the order in which they are joined."""
    return [handles[route.ranks[rank]].ref for rank in plan.collect_ranks]
