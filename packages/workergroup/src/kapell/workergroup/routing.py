"""From a plan to the workers: what a group and its views share, and how one of them sends a call."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import add
from typing import TYPE_CHECKING, Any
from weakref import ref

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
    chosen: int = -1
    """Rank that `choose` gave last."""
    _pending: set[ref[PendingCall[Any]]] = field(default_factory=set)

    def note(self, call: PendingCall[Any]) -> None:
        """Keep a call in sight as long as somebody holds it."""
        self._pending.add(ref(call, self._pending.discard))  # a WeakSet does the same, at ten times the price

    def calls(self) -> list[PendingCall[Any]]:
        """The calls that somebody still holds."""
        return [call for reference in list(self._pending) if (call := reference()) is not None]

    def __getstate__(self) -> tuple[Workers[Any], float, bool]:
        return self.workers, self.limit, self.closed  # calls, and their records, stay with the process that made them

    def __setstate__(self, state: tuple[Workers[Any], float, bool]) -> None:
        Runtime.__init__(self, *state)

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
    by_reference: bool = False
    """Whether batches stay with the workers that return them."""

    def send(
        self, method: str, plan: DispatchPlan, span: CallSpan | None, *, began: float, direct: bool
    ) -> tuple[dict[int, Any], CallRecord]:
        """Send a planned call; the handle of each rank, and the record of what it costs.

        ``direct`` is that of `RankCall`. Raises `GroupClosedError` after the group was closed.
        """
        if self.runtime.closed:
            raise GroupClosedError(self.role)
        workers, ranks = self.runtime.workers, plan.ranks
        own_ranks = list(self.ranks) if len(ranks) == len(self.ranks) else [self.ranks[rank] for rank in ranks]
        record = self.runtime.ledger.open(self.role, method, began, own_ranks)
        put_began = time.perf_counter()
        positional: list[Sequence[Any]] = []
        named: dict[str, Sequence[Any]] = {}
        for argument in plan.arguments:
            column, sizes, sent = _put(workers, argument.values, argument.index, ranks)
            record.sent += sent
            record.bytes_in = list(map(add, record.bytes_in, sizes))
            if argument.name is None:
                positional.append(column)
            else:
                named[argument.name] = column
        record.put_seconds = time.perf_counter() - put_began

        num_ranks = len(own_ranks)
        all_args: Iterable[tuple[Any, ...]] = zip(*positional, strict=True) if positional else repeat((), num_ranks)
        all_kwargs: Iterable[Mapping[str, Any]] = repeat({}, num_ranks)
        if named:
            all_kwargs = [dict(zip(named, values, strict=True)) for values in zip(*named.values(), strict=True)]
        collected = set(plan.collect_ranks)
        trace = "" if span is None else span.trace
        submit, sending, target, now = workers.submit, record.sending, self.target, time.time
        number, kept = self.runtime.ledger.first + record.number, self.by_reference
        handles = {}
        for rank, own_rank, args, kwargs in zip(ranks, own_ranks, all_args, all_kwargs, strict=True):
            call = RankCall(own_rank, method, args, kwargs, target, rank in collected, number, trace, direct, kept)
            sending.append(now())
            handles[own_rank] = submit(call)
        sending.append(now())
        return handles, record

    def restart(self, own_rank: int) -> None:
        """Build one worker anew. Raises `GroupClosedError` after the group was closed: nobody would end it."""
        if self.runtime.closed:
            raise GroupClosedError(self.role)
        self.runtime.workers.restart(own_rank)

    def rank_context(self, method: str, plan: DispatchPlan, rank: int, error: Exception) -> RankContext:
        """What an error of one rank says about where it stood."""
        local_rank = list(self.ranks).index(rank)
        rows = plan.rows[plan.ranks.index(local_rank)] if any(plan.rows) else None
        args, kwargs = plan.call_for(local_rank)
        labels = [argument.label for argument in plan.arguments if argument.name is None]
        columns = column_shapes({**dict(zip(labels, args, strict=True)), **kwargs})
        return RankContext(self.role, rank, method, mesh_place_of(error), rows, columns)


def _put(
    workers: Workers[Any], values: Sequence[Any], index: Sequence[int], ranks: Sequence[int]
) -> tuple[Sequence[Any], Sequence[int], int]:
    """One argument made ready to be sent: what each rank gets, its size in bytes, and that of all distinct values."""
    if len(values) == 1:
        (value,) = values
        readers, size = len(index), size_of(value)
        return [workers.put(value, readers)] * readers, [size] * readers, size
    own_values = list(values)  # may cut each shard as it is asked for: once
    sizes = list(map(size_of, own_values))
    if index == ranks and len(own_values) == len(ranks):
        return list(map(workers.put, own_values, repeat(1))), sizes, sum(sizes)
    num_readers = Counter(index)
    shipped = [workers.put(value, num_readers[position]) for position, value in enumerate(own_values)]
    return [shipped[at] for at in index], [sizes[at] for at in index], sum(sizes)
