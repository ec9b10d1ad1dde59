"""The backend contract: the processes behind a group, and one rank's share of a call."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from .answering import RUN_TIMES, RunTime
from .errors import LostWorker

__all__ = ["RankCall", "Workers"]

HandleT = TypeVar("HandleT")


class RankCall(NamedTuple):
    """One rank's share of a group call. A backend hands it to the `CallRunner` of that rank's process."""

    rank: int
    """The rank that runs it."""
    method: str
    """Name of the worker's method."""
    args: tuple[Any, ...] = ()
    """Positional arguments; entries may be what `Workers.put` returned."""
    kwargs: Mapping[str, Any] = MappingProxyType({})
    """Keyword arguments, likewise."""
    target: str = ""
    """Role inside a colocated worker; empty for the worker itself."""
    wanted: bool = True
    """Whether the result is collected; otherwise the worker answers None, so that nothing travels for nothing."""
    number: int = 0
    """Number of the call, the same on all ranks and no other call's; names it in the workers' log of run times."""
    trace: str = ""
    """W3C ``traceparent`` of the caller's OpenTelemetry span; empty without one."""
    direct: bool = False
    """Whether the caller waits for the answer and nobody else gets its handle: it may travel in any form."""
    by_reference: bool = False
    """Whether a batch that is returned stays with the worker, and the caller gets a reference to it."""

    def run_options(self) -> dict[str, Any]:
        """What `CallRunner.run` is told beside method and arguments."""
        options = {"target": self.target, "wanted": self.wanted, "number": self.number, "trace": self.trace}
        return {**options, "by_reference": True} if self.by_reference else options


class Workers(ABC, Generic[HandleT]):
    """The processes (or threads, or objects) behind a group: all that a backend implements besides making them.

    A handle stands for one submitted call. Calls of one rank run in the order they were submitted. What runs in each
    process is a `CallRunner`. When a constructor fails, the backend tears all workers down and raises
    `failed_start(...)`; it does so at once, without waiting for ranks that are still constructing.
    """

    concurrent: bool = True
    """Whether the ranks of a call run side by side."""
    _asked: Mapping[int, HandleT] = MappingProxyType({})
    """By rank: the question for run times that it has not answered yet."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of workers."""

    @abstractmethod
    def put(self, value: Any, num_readers: int) -> Any:
        """Make an argument that ``num_readers`` ranks read ready to be sent, serializing it at most once."""

    @abstractmethod
    def submit(self, call: RankCall) -> HandleT:
        """Start a call and return at once (in process it may run right here). Never raises the worker's own error."""

    @abstractmethod
    def wait(self, handles: Sequence[HandleT], timeout: float | None) -> list[HandleT]:
        """All of ``handles`` that are done: at least one, unless ``timeout`` seconds passed first."""

    @abstractmethod
    def fetch(self, handle: HandleT) -> Any:
        """The result of a finished call. Raises the worker's exception (or `RemoteError` for it), or `LostWorker`."""

    def fetch_all(self, handles: Sequence[HandleT], timeout: float | None) -> list[Any] | None:
        """A short cut that a backend may offer: all results at once, or None when a call failed or is not done yet."""
        return None

    @abstractmethod
    def is_alive(self, rank: int) -> bool:
        """Whether the worker's process is there; answers at once, whatever the worker is busy with."""

    @abstractmethod
    def restart(self, rank: int) -> None:
        """Build the worker anew with its constructor arguments, whether or not its process is gone."""

    @abstractmethod
    def close(self) -> None:
        """End all workers and release what they hold. Called once."""

    def alive(self, ranks: Sequence[int]) -> list[bool]:
        """`is_alive` of each rank; a backend that has to wait for answers asks all at once."""
        return [self.is_alive(rank) for rank in ranks]

    def environment(self, rank: int) -> Mapping[str, str]:
        """The variables that tell a rank its place, for records of its calls."""
        return {"RANK": str(rank), "WORLD_SIZE": str(self.world_size)}

    def run_times(self, ranks: Sequence[int], timeout: float) -> dict[int, list[RunTime]]:
        """When calls ran, for each rank that is free to answer; each call is told once.

        The default asks each `CallRunner` through an ordinary call. What a busy rank is asked, it answers after its
        call, and only once: the question is kept for the next time.
        """
        asked = dict(self._asked)
        times: dict[int, list[RunTime]] = {}
        self._take_told(asked, times, 0.0)
        free = [rank for rank in ranks if rank not in asked]
        for rank, alive in zip(free, self.alive(free), strict=True):
            if alive:
                asked[rank] = self.submit(RankCall(rank, RUN_TIMES))
        self._take_told(asked, times, timeout)
        self._asked = asked
        return times

    def _take_told(self, asked: dict[int, HandleT], times: dict[int, list[RunTime]], seconds: float) -> None:
        """Move what ranks tell in time from ``asked`` to ``times``."""
        end = time.monotonic() + seconds
        while asked and (done := self.wait(list(asked.values()), max(0.0, end - time.monotonic()))):
            answered = set(map(id, done))
            for rank in [rank for rank, handle in asked.items() if id(handle) in answered]:
                with suppress(LostWorker):  # and its log with it
                    told = self.fetch(asked.pop(rank))
                    times.setdefault(rank, []).extend(told)
