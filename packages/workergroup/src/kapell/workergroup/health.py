"""Whether workers live: asked on demand, or watched from a background thread. Never a signal."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from .routing import Route

__all__ = ["Liveness", "RankHealth", "rank_health"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankHealth:
    """How one worker does."""

    rank: int
    alive: bool
    """Whether its process is there."""
    unanswered: tuple[str, ...]
    """Calls that it has not answered, oldest first, as far as somebody still holds their `PendingCall`."""


def rank_health(route: Route) -> list[RankHealth]:
    """The health of each rank of a route."""
    runtime = route.runtime
    unanswered: dict[int, list[str]] = {rank: [] for rank in route.ranks}
    for call in sorted(runtime.calls(), key=lambda call: call.sent_at):
        for rank in call.busy_ranks():
            if rank in unanswered:
                unanswered[rank].append(call.label)
    alive = [False] * len(unanswered) if runtime.closed else runtime.workers.alive(list(unanswered))
    return [
        RankHealth(rank, lives, tuple(calls)) for (rank, calls), lives in zip(unanswered.items(), alive, strict=True)
    ]


class Liveness:
    """A watch over the workers of a route; ends with `close`, with the block, or with the group."""

    def __init__(self, route: Route, on_lost: Callable[[int], None], interval: float) -> None:
        if interval <= 0:
            raise ValueError(f"interval is {interval}; give a positive number of seconds")
        self._route = route
        self._on_lost = on_lost
        self._interval = interval
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"watch-{route.role}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Harmless when repeated, also from ``on_lost``."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _watch(self) -> None:
        runtime = self._route.runtime
        lost: set[int] = set()
        while not self._closed.wait(self._interval) and not runtime.closed:
            ranks = self._route.ranks
            for rank, alive in zip(ranks, runtime.workers.alive(ranks), strict=True):
                if alive:
                    lost.discard(rank)  # restarted
                elif rank not in lost and not runtime.closed:
                    lost.add(rank)
                    if not runtime.workers.is_alive(rank):  # not restarted while another rank's loss was told
                        self._tell(rank)

    def _tell(self, rank: int) -> None:
        _logger.error("%s: the process of rank %d is gone", self._route.role, rank)
        try:
            self._on_lost(rank)
        except Exception:  # the watch must outlive a faulty callback
            _logger.exception("%s: on_lost(%d) raised", self._route.role, rank)
