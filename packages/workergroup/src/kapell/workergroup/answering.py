"""What runs inside a worker's process: the one piece with which every backend answers calls."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from types import CoroutineType
from typing import TYPE_CHECKING, Any, NamedTuple

from kapell.decorators import is_future, materialize, spec_of

from .errors import set_mesh_place
from .spans import worker_span

if TYPE_CHECKING:
    from .loops import WorkerLoop

__all__ = ["RUN_TIMES", "CallRunner", "RunTime"]

RUN_TIMES = "__kapell_run_times__"
"""Instead of a method's name: asks a `CallRunner` for its log of run times."""

_NO_SPAN = nullcontext()
_NO_FUTURES = frozenset({bool, int, float, str, bytes, list, tuple, dict, type(None)})
_KEPT_RUN_TIMES = 4096  # about 400 kB; a controller that never asks must not fill the worker's memory


class RunTime(NamedTuple):
    """When one call ran on one rank, in seconds since the epoch by the worker's clock."""

    number: int
    """The call's number, as in `RankCall`."""
    started: float
    """When the method began."""
    finished: float
    """When it returned or raised."""


class CallRunner:
    """Answers the calls of one worker: finds the role, resolves futures, awaits async methods, logs when each ran.

    ``receive`` is applied to the value of each future argument; an in-process backend makes it private there.
    ``store`` takes the batches that calls by reference return. Errors of the method are raised as they are, marked with
    the worker's mesh coordinates; a backend whose answers leave the process sends them through `pack_error`.
    """

    def __init__(self, worker: Any, *, receive: Callable[[Any], Any] | None = None, store: Any = None) -> None:
        self.worker = worker
        self._receive = receive
        self._store = store
        self._log: deque[tuple[int, float, float]] = deque(maxlen=_KEPT_RUN_TIMES)
        self._loop: WorkerLoop | None = None

    def run(
        self,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        target: str = "",
        wanted: bool = True,
        number: int = 0,
        trace: str = "",
        by_reference: bool = False,
    ) -> Any:
        """The answer to one call: the method's result, or None unless ``wanted``; see `RankCall` for the rest."""
        if trace:
            with worker_span(trace, method):
                return self.run(
                    method, args, kwargs, target=target, wanted=wanted, number=number, by_reference=by_reference
                )
        if method == RUN_TIMES:
            return self.take_run_times()
        started = time.time()
        try:
            bound = getattr(self.worker.role_worker(target) if target else self.worker, method)
            if kwargs or not _NO_FUTURES.issuperset(map(type, args)):
                args, kwargs = _materialized(bound, args, kwargs, self._receive)
            result = bound(*args, **kwargs) if kwargs else bound(*args)
            if type(result) is CoroutineType:
                result = self._finish(result)
            if by_reference and wanted:
                result = self._kept(result)
        except BaseException as error:
            set_mesh_place(error, self._mesh_place(target))
            raise
        finally:
            self._log.append((number, started, time.time()))
        return result if wanted else None

    async def run_async(
        self,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        target: str = "",
        wanted: bool = True,
        number: int = 0,
        trace: str = "",
        by_reference: bool = False,
    ) -> Any:
        """As `run`, for a process with an event loop of its own: async methods run side by side."""
        if method == RUN_TIMES:
            return self.take_run_times()
        with worker_span(trace, method) if trace else _NO_SPAN:
            started = time.time()
            try:
                bound = getattr(self.worker.role_worker(target) if target else self.worker, method)
                if any(map(is_future, (*args, *kwargs.values()))):
                    import asyncio  # here alone: it is slow to import, and loaded already where this runs

                    # In a thread: what a future waits for may need this event loop.
                    args, kwargs = await asyncio.to_thread(_materialized, bound, args, kwargs, self._receive)
                result = bound(*args, **kwargs)
                if type(result) is CoroutineType:
                    result = await result
                if by_reference and wanted:
                    result = self._kept(result)
            except BaseException as error:
                set_mesh_place(error, self._mesh_place(target))
                raise
            finally:
                self._log.append((number, started, time.time()))
        return result if wanted else None

    def take_run_times(self) -> list[RunTime]:
        """The log of run times since the last time it was taken."""
        times = []
        while self._log:
            times.append(RunTime(*self._log.popleft()))
        return times

    def close(self) -> None:
        """Close the event loop. The worker itself is left to its owner."""
        if self._loop is not None:
            self._loop.close()

    def _finish(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            from .loops import (
                WorkerLoop,  # asyncio is a third of the import time, and most workers have no async method
            )

            self._loop = WorkerLoop()
        return self._loop.run(coroutine)

    def _kept(self, result: Any) -> Any:
        """A reference to a batch, by the batch's own doing; any other result, and all without a store, as they are."""
        keep = getattr(type(result), "__kapell_keep__", None)
        return result if keep is None or self._store is None else keep(result, self._store)

    def _mesh_place(self, target: str) -> dict[str, dict[str, int]]:
        try:
            owner = self.worker.role_worker(target) if target else self.worker
        except KeyError:
            return {}
        return dict(getattr(owner, "mesh_places", {}))


def _materialized(
    bound: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], receive: Callable[[Any], Any] | None
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments with futures fetched, unless the method wants them as they are."""
    if any(map(is_future, args)) or any(map(is_future, kwargs.values())):
        spec = spec_of(bound)
        if spec is None or spec.materialize_futures:
            values, named = materialize(args, kwargs, () if spec is None else spec.reads)
            if receive is None:
                return values, named
            # An argument that was none is private already.
            return (
                [receive(value) if is_future(arg) else value for arg, value in zip(args, values, strict=True)],
                {name: receive(value) if is_future(kwargs[name]) else value for name, value in named.items()},
            )
    return args, kwargs
