"""What a non-blocking call on Ray returns: Kapell's future and, for code written for verl, a list of Ray references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import ray

from kapell.workergroup import PendingCall

__all__ = ["RayPendingCall", "ResultElsewhere"]

ResultT = TypeVar("ResultT")


class RayPendingCall(PendingCall[ResultT], list):  # ty: ignore[unsupported-base]
    """A call under way. ``get``, ``await`` and ``as_completed`` work as on every backend.

    It also is the list of references to the collected ranks' results, so that ``ray.get(pending)`` gives these as a
    list. Given to a method of another group, the references travel: the data goes from worker to worker.
    """

    def __init__(self, route: Any, method: str, plan: Any, handles: Any, record: Any, **options: Any) -> None:
        list.__init__(self, [handles[route.ranks[rank]] for rank in plan.collect_ranks])
        PendingCall.__init__(self, route, method, plan, handles, record, **options)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return ResultElsewhere, (list(self), self.plan.collector)

    # As a future it is itself and no other, however its references compare.
    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __ne__ = object.__ne__


class ResultElsewhere:
    """A pending call in a process that did not make it: fetches the ranks' results and collects them there."""

    __kapell_future__ = True

    def __init__(self, references: Sequence[ray.ObjectRef], collector: Callable[[list[Any]], Any]) -> None:
        self._references = list(references)
        self._collector = collector

    def get(self, timeout: float | None = None) -> Any:
        """The collected result. Raises what the call raised, or ``ray.exceptions.GetTimeoutError``."""
        return self._collector(ray.get(self._references, timeout=timeout))

    def __reduce__(self) -> tuple[Any, ...]:
        return ResultElsewhere, (self._references, self._collector)
