"""From a plan to the workers: what a group and its views share, and how one of them sends a call."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from kapell.decorators import DispatchPlan

from .accounting import CallRecord, Ledger
from .describe import column_shapes
from .errors import GroupClosedError, RankContext, mesh_place_of
from .sizes import size_of
from .spans import CallSpan
from .workers import RankCall, Workers

if TYPE_CHECKING:
    from .calls import PendingCall

__all__ = ["Route", "Runtime"]


@dataclass(slots=True, weakref_slot=True, eq=False)
class Runtime:
    """Shared by a group and its views, which keep it, and so the workers, alive."""

    workers: Workers[Any]
    limit: float
    """Seconds that a call may take unless it says otherwise."""
    closed: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    pending: WeakSet[PendingCall[Any]] = field(default_factory=WeakSet)
    """Calls that somebody still holds."""
    chosen: int = -1
    """Rank that `choose` gave last."""

    def close(self) -> None:
        """End all workers, once."""
        if not self.closed:
            self.closed = True
            self.workers.close()


@dataclass(frozen=True, slots=True)
class Route:
    """The way of one group's or view's calls to its workers."""

    runtime: Runtime
    role: str
    """Name of the group in errors and statistics."""
    target: str
    """Role inside colocated workers; empty for the workers themselves."""
    ranks: Sequence[int]
    """The workers' own rank of each rank of the view."""

    def send(
        self, method: str, plan: DispatchPlan, span: CallSpan | None, *, began: float
    ) -> tuple[dict[int, Any], CallRecord]:
        """Send a planned call; the handle of each rank, and the record of what it costs.

        Raises `GroupClosedError` after the group was closed.
        """
        if self.runtime.closed:
            raise GroupClosedError(self.role)
        workers = self.runtime.workers
        own_ranks = [self.ranks[rank] for rank in plan.ranks]
        record = self.runtime.ledger.open(self.role, method, began, own_ranks)
        put_began = time.perf_counter()
        positional: list[list[Any]] = []
        named: dict[str, list[Any]] = {}
        for argument in plan.arguments:
            shipped, sizes = _put(workers, argument.values, argument.index)
            record.bytes_in = [size + sizes[at] for size, at in zip(record.bytes_in, argument.index, strict=True)]
            column = [shipped[at] for at in argument.index]
            if argument.name is None:
                positional.append(column)
            else:
                named[argument.name] = column
        record.put_seconds = time.perf_counter() - put_began

        num_ranks = len(own_ranks)
        all_args = list(zip(*positional, strict=True)) if positional else [()] * num_ranks
        all_kwargs: list[dict[str, Any]] = [{}] * num_ranks
        if named:
            all_kwargs = [dict(zip(named, values, strict=True)) for values in zip(*named.values(), strict=True)]
        collected = set(plan.collect_ranks)
        trace = "" if span is None else span.trace
        submit, number, sending = workers.submit, record.number, record.sending
        handles = {}
        for rank, own_rank, args, kwargs in zip(plan.ranks, own_ranks, all_args, all_kwargs, strict=True):
            call = RankCall(own_rank, method, args, kwargs, self.target, rank in collected, number, trace)
            sending.append(time.time())
            handles[own_rank] = submit(call)
        sending.append(time.time())
        return handles, record

    def rank_context(self, method: str, plan: DispatchPlan, rank: int, error: Exception) -> RankContext:
        """What an error of one rank says about where it stood."""
        local_rank = list(self.ranks).index(rank)
        rows = plan.rows[plan.ranks.index(local_rank)] if any(plan.rows) else None
        args, kwargs = plan.call_for(local_rank)
        labels = [argument.label for argument in plan.arguments if argument.name is None]
        columns = column_shapes({**dict(zip(labels, args, strict=True)), **kwargs})
        return RankContext(self.role, rank, method, mesh_place_of(error), rows, columns)


def _put(workers: Workers[Any], values: Sequence[Any], index: Sequence[int]) -> tuple[list[Any], list[int]]:
    """Each distinct value of an argument made ready to be sent, and its size in bytes."""
    if len(values) == 1:
        (value,) = values
        return [workers.put(value, len(index))], [size_of(value)]
    own_values = list(values)  # may cut each shard as it is asked for: once
    put = workers.put
    if len(own_values) == len(index):
        shipped = [put(value, 1) for value in own_values]
    else:
        num_readers = Counter(index)
        shipped = [put(value, num_readers[position]) for position, value in enumerate(own_values)]
    return shipped, [size_of(value) for value in own_values]
