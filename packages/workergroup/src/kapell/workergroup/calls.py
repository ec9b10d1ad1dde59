"""One call of a group under way: gathers the ranks' answers as they come, and collects them into the result."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

from kapell.decorators import DispatchPlan

from .accounting import CallRecord
from .errors import BusyRank, CallTimeoutError, LostWorker
from .failures import FAILURE_GRACE_SECONDS, WorkerFailedError
from .routing import Route
from .sizes import size_of
from .spans import CallSpan
from .transport import show_user_frames

__all__ = ["PendingCall"]

ResultT = TypeVar("ResultT")

_logger = logging.getLogger(__name__)

_REPORT_SECONDS = 600.0  # how often a long wait says in the log what it waits for


class PendingCall(Generic[ResultT]):
    """A call under way: wait for it with ``get``, await it, iterate over it, or give it to the next call.

    Ranks are the workers' own, in the whole group, also when the call was made through a slice of it. Once a rank has
    failed, the others get one more second to answer, so that a common failure is reported as one.
    """

    __kapell_future__ = True

    def __init__(
        self,
        route: Route,
        method: str,
        plan: DispatchPlan,
        handles: Mapping[int, Any],
        record: CallRecord,
        *,
        limit: float,
        retry: int = 0,
        span: CallSpan | None = None,
        direct: bool = False,
    ) -> None:
        self._route = route
        self._method = method
        self._plan = plan
        self._limit = limit
        self._retry = retry
        self._span = span
        self._direct = direct
        self._lock = threading.Lock()
        self._result: tuple[ResultT] | None = None
        self._error: WorkerFailedError | None = None
        self._expect(handles, record)

    def _expect(self, handles: Mapping[int, Any], record: CallRecord) -> None:
        self._waiting = dict(handles)
        self._slots: dict[int, int] | None = None  # by rank: its place in the record; most calls never ask
        self._record = record
        self._results: dict[int, Any] = {}
        self._failures: dict[int, Exception] = {}
        self._failed_at = 0.0
        self.sent_at = time.monotonic()

    @property
    def plan(self) -> DispatchPlan:
        """How the call was dispatched."""
        return self._plan

    @property
    def label(self) -> str:
        """Role and method, as errors and logs name the call."""
        return f"{self._route.role}.{self._method}"

    def done(self) -> bool:
        """Whether every rank has answered; never waits."""
        return not self.busy_ranks()

    def busy_ranks(self) -> list[int]:
        """The ranks that have not answered; never waits."""
        waiting = dict(self._waiting)
        if not waiting:
            return []
        answered = set(map(id, self._route.runtime.workers.wait(list(waiting.values()), 0.0)))
        return [rank for rank, handle in waiting.items() if id(handle) not in answered]

    def get(self, timeout: float | None = None) -> ResultT:
        """The collected result; the same object every time.

        Raises `WorkerFailedError` with all failing ranks, `WorkerLostError` when a worker died, and `CallTimeoutError`
        when ``timeout`` seconds pass first, or, without one, the call's own time since it was sent. After a timeout
        the call goes on, and ``get`` may be called again.
        """
        deadline = self.sent_at + self._limit if timeout is None else time.monotonic() + timeout
        # Workers on threads may wait for the same call as the controller does.
        free = self._lock.acquire(blocking=False) or self._lock.acquire(timeout=_bounded(deadline - time.monotonic()))
        if not free:
            raise self._timed_out(timeout)
        try:
            while self._result is None:
                self._gather(deadline, timeout)
        finally:
            self._lock.release()
        return self._result[0]

    def as_completed(self, timeout: float | None = None) -> Iterator[tuple[int, Any]]:
        """Each rank with its own result, in the order in which they finish. To be used before ``get``, or instead.

        Raises as ``get`` does, at the first failure.
        """
        if self._result is not None:
            raise RuntimeError(f"{self.label} is collected already; iterate over a call before its get()")
        deadline = self.sent_at + self._limit if timeout is None else time.monotonic() + timeout
        yield from list(self._results.items())
        while self._waiting:
            arrived = self._advance(deadline)
            if not arrived and not self._failures:
                raise self._timed_out(timeout)
            for rank in arrived:
                if rank in self._results:
                    yield rank, self._results[rank]
            if self._failures:
                raise self._failed()

    def __await__(self) -> Generator[Any, None, ResultT]:
        import asyncio  # a third of the import time, and whoever awaits has it

        return asyncio.to_thread(self.get).__await__()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Any]]:
        import asyncio

        finished = self.as_completed()
        end = object()
        while (item := await asyncio.to_thread(next, finished, end)) is not end:
            yield cast("tuple[int, Any]", item)

    def _gather(self, deadline: float, timeout: float | None) -> None:
        """Bring the call to its end: a result, an error, or another try of it."""
        if self._error is not None:
            raise self._error
        if not self._results and not self._failures:
            self._fetch_all(deadline)
        while self._waiting:
            until = min(deadline, self._failed_at + FAILURE_GRACE_SECONDS) if self._failures else deadline
            if not self._advance(until):
                if self._failures:
                    break
                raise self._timed_out(timeout)
        if not self._failures:
            self._collect()
        elif self._retry > 0 and not self._route.runtime.closed:
            self._retry -= 1
            self._send_again()
        else:
            raise self._failed()

    def _fetch_all(self, deadline: float) -> None:
        began = time.perf_counter()
        handles = list(self._waiting.values())
        values = self._route.runtime.workers.fetch_all(handles, _bounded(deadline - time.monotonic()))
        if values is None:
            return
        record = self._record
        record.collect = [(time.perf_counter() - began) / len(values)] * len(values)
        record.bytes_out = list(map(size_of, values))
        self._results = dict(zip(self._waiting, values, strict=True))
        self._waiting = {}

    def _advance(self, until: float) -> list[int]:
        """Wait for at least one more rank; the ranks that answered, none when the time was over."""
        ranks = {id(handle): rank for rank, handle in self._waiting.items()}
        handles = list(self._waiting.values())
        answered: list[Any] = []
        while not answered:
            remaining = max(0.0, until - time.monotonic())
            answered = self._route.runtime.workers.wait(handles, min(remaining, _REPORT_SECONDS))
            if not answered and remaining <= _REPORT_SECONDS:
                return []
            if not answered:
                busy, waited = sorted(self._waiting), time.monotonic() - self.sent_at
                _logger.warning("%s: still waiting for ranks %s after %.0f s", self.label, busy, waited)
        return [self._take(ranks[id(handle)], handle) for handle in answered]

    def _take(self, rank: int, handle: Any) -> int:
        if self._slots is None:
            self._slots = {own: slot for slot, own in enumerate(self._record.ranks)}
        slot = self._slots[rank]
        del self._waiting[rank]
        began = time.perf_counter()
        try:
            value = self._route.runtime.workers.fetch(handle)
        except Exception as error:  # whatever the user's method raised
            show_user_frames(error)
            self._failures[rank] = error
            self._failed_at = self._failed_at or time.monotonic()
        else:
            self._results[rank] = value
            self._record.bytes_out[slot] = size_of(value)
        self._record.collect[slot] = time.perf_counter() - began
        return rank

    def _collect(self) -> None:
        plan = self._plan
        world_ranks = map(self._route.ranks.__getitem__, plan.collect_ranks)
        try:
            result = plan.collect(list(map(self._results.__getitem__, world_ranks)))
        except BaseException as error:
            self._end(error)
            raise
        self._result = (result,)
        self._results.clear()
        self._end(None)

    def _send_again(self) -> None:
        _logger.warning("%s failed on ranks %s; trying again", self.label, sorted(self._failures))
        for rank, error in self._failures.items():
            if isinstance(error, LostWorker):
                try:
                    self._route.restart(rank)
                except Exception as refused:  # such as for workers that another program has started
                    raise self._failed() from refused
        sent = self._route.send(self._method, self._plan, self._span, began=time.time(), direct=self._direct)
        self._expect(*sent)

    def _failed(self) -> WorkerFailedError:
        self._error = WorkerFailedError.of(
            [(self._route.rank_context(self._method, self._plan, rank, e), e) for rank, e in self._failures.items()],
            world_size=len(self._plan.ranks),
            results=self._results,
            unfinished=sorted(self._waiting),
        )
        self._end(self._error)
        return self._error

    def _timed_out(self, timeout: float | None) -> CallTimeoutError:
        seconds = time.monotonic() - self.sent_at
        busy = {rank: BusyRank(time.time() - seconds, seconds, self.label) for rank in self.busy_ranks()}
        for call in self._route.runtime.calls():
            if call.sent_at < self.sent_at:
                for rank in busy.keys() & set(call.busy_ranks()):
                    busy[rank] = busy[rank]._replace(running=f"{call.label}, sent before")
        limit = self._limit if timeout is None else timeout
        return CallTimeoutError(self._route.role, self._method, limit, busy, self._results)

    def _end(self, error: BaseException | None) -> None:
        self._record.end("" if error is None else type(error).__name__)
        if self._span is not None:
            self._span.end(error)
            self._span = None


def _bounded(seconds: float) -> float:
    """A time that locks take: not negative, not infinite."""
    return min(max(seconds, 0.0), threading.TIMEOUT_MAX)
