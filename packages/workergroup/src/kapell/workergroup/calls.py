"""One call of a group: its method object, and the pending call that gathers the ranks' answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from kapell.decorators import DispatchPlan, MethodSpec

from .errors import CallTimeoutError, RankContext, WorkerFailedError
from .workers import Workers

if TYPE_CHECKING:
    from .group import WorkerGroup

__all__ = ["GroupMethod", "PendingCall"]

HandleT = TypeVar("HandleT")
ResultT = TypeVar("ResultT")

# When one rank fails, others often fail for the same reason a moment later: report them together, but don't wait for a
# rank that hangs in a collective with the failed one.
_FAILURE_GRACE_SECONDS = 1.0


class PendingCall(Generic[ResultT]):
    """A call under way: wait for it with ``get``, await it, iterate over it, or give it to the next call."""

    __kapell_future__ = True

    def __init__(
        self,
        workers: Workers[Any],
        plan: DispatchPlan,
        handles: Mapping[int, Any],
        *,
        role: str,
        context: Callable[[int], RankContext],
        collect: Callable[[list[Any]], ResultT],
    ) -> None:
        self._workers = workers
        self._plan = plan
        self._handles = dict(handles)
        self._role = role
        self._context = context
        self._collect = collect
        self._sent_at = time.monotonic()
        self._results: dict[int, Any] = {}
        self._failures: list[tuple[RankContext, Exception]] = []
        self._outcome: tuple[ResultT] | None = None

    @property
    def plan(self) -> DispatchPlan:
        """How the call was dispatched."""
        return self._plan

    def done(self) -> bool:
        """Whether every rank has answered; never waits."""
        pending = self._pending()
        return not pending or len(self._workers.wait(list(pending.values()), 0.0)) == len(pending)

    def get(self, timeout: float | None = None) -> ResultT:
        """The collected result; the same object every time.

        Raises `WorkerFailedError` with all failing ranks, `WorkerLostError` when a worker died, and `CallTimeoutError`
        when ``timeout`` seconds pass first (the call goes on; ``get`` may be called again).
        """
        if self._outcome is None:
            self._gather(timeout)
            self._raise_failures()
            self._outcome = (self._collect([self._results[rank] for rank in self._plan.collect_ranks]),)
            self._results.clear()
        return self._outcome[0]

    def as_completed(self, timeout: float | None = None) -> Iterator[tuple[int, Any]]:
        """Each rank with its own result, in the order in which they finish."""
        for rank in list(self._results):
            yield rank, self._results[rank]
        deadline = None if timeout is None else time.monotonic() + timeout
        while pending := self._pending():
            for rank in self._advance(pending, deadline, timeout):
                yield rank, self._results[rank]
            self._raise_failures()

    def __await__(self) -> Generator[Any, None, ResultT]:
        return asyncio.to_thread(self.get).__await__()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Any]]:
        finished = self.as_completed()
        end = object()
        while (item := await asyncio.to_thread(next, finished, end)) is not end:
            yield cast("tuple[int, Any]", item)

    def _pending(self) -> dict[int, Any]:
        failed = {context.rank for context, _ in self._failures}
        return {rank: h for rank, h in self._handles.items() if rank not in self._results and rank not in failed}

    def _gather(self, timeout: float | None) -> None:
        if not self._results and not self._failures:
            values = self._workers.fetch_all(list(self._handles.values()), timeout)
            if values is not None:
                self._results = dict(zip(self._handles, values, strict=True))
                return
        deadline = None if timeout is None else time.monotonic() + timeout
        while pending := self._pending():
            if self._failures:
                grace = time.monotonic() + _FAILURE_GRACE_SECONDS
                deadline = grace if deadline is None else min(grace, deadline)
            try:
                self._advance(pending, deadline, timeout)
            except CallTimeoutError:
                if self._failures:
                    return
                raise

    def _advance(self, pending: Mapping[int, Any], deadline: float | None, timeout: float | None) -> list[int]:
        """Wait until at least one more rank has answered; the ranks that answered with a result."""
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        ranks = {id(handle): rank for rank, handle in pending.items()}
        answered = self._workers.wait(list(pending.values()), remaining)
        if not answered:
            busy = dict.fromkeys(pending, time.monotonic() - self._sent_at)
            raise CallTimeoutError(self._role, self._plan.method, timeout or 0.0, busy, self._results)
        arrived = []
        for handle in answered:
            rank = ranks[id(handle)]
            try:
                self._results[rank] = self._workers.fetch(handle)
            except Exception as error:  # whatever the user's method raised
                self._failures.append((self._context(rank), error))
            else:
                arrived.append(rank)
        return arrived

    def _raise_failures(self) -> None:
        if self._failures:
            raise WorkerFailedError.of(
                self._failures,
                world_size=len(self._handles),
                results=self._results,
                unfinished=sorted(self._pending()),
            )


class GroupMethod:
    """A labelled worker method as a method of the whole group."""

    def __init__(
        self,
        group: WorkerGroup,
        name: str,
        spec: MethodSpec,
        function: Callable[..., Any],
        *,
        blocking: bool | None = None,
        timeout: float | None = None,
    ) -> None:
        self._group = group
        self._spec = spec
        self._function = function
        self._blocking = spec.blocking if blocking is None else blocking
        self._timeout = timeout
        self.__name__ = name
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    @property
    def spec(self) -> MethodSpec:
        """How the method is dispatched."""
        return self._spec

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Dispatch, run and collect; a non-blocking call returns a `PendingCall`."""
        pending = self._group.start_call(self.plan(*args, **kwargs))
        return pending.get(self._timeout) if self._blocking else pending

    def plan(self, *args: Any, **kwargs: Any) -> DispatchPlan:
        """What a call with these arguments would send to which rank; runs nothing."""
        return self._group.plan_call(self.__name__, self._spec, self._function, args, kwargs)

    def options(
        self, *, blocking: bool | None = None, timeout: float | None = None, dispatch: Any = None
    ) -> GroupMethod:
        """The same method with other settings for the calls made through it: wait or not, seconds, dispatch mode."""
        spec = self._spec if dispatch is None else self._spec.with_dispatch(dispatch)
        return GroupMethod(
            self._group,
            self.__name__,
            spec,
            self._function,
            blocking=self._blocking if blocking is None else blocking,
            timeout=self._timeout if timeout is None else timeout,
        )

    def __repr__(self) -> str:
        return f"<method {self.__name__} of group {self._group.role!r} with {self._group.world_size} workers>"
