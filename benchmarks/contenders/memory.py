"""Peaks of memory: what processes hold for themselves, and what the shared-memory store holds."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

__all__ = ["PeakMemory", "group_peaks", "peaks"]

_INTERVAL = 0.005  # seconds between two looks; a phase of a 256 MB transfer takes tens of milliseconds


def peaks(
    fresh: Callable[[], Sequence[int]],
    nbytes: int,
    *,
    sending: Callable[[], object],
    to_all: Callable[[], object],
    echo: Callable[[], object],
) -> dict[str, float]:
    """What each call takes at most, in multiples of ``nbytes``.

    Each has a session of its own, which ``fresh`` starts, giving the workers' process ids: a store keeps the pages that
    it has once touched, and may take others for the next call.
    """
    numbers = {}
    for name, call in (("sending", sending), ("the whole to all", to_all)):
        with PeakMemory(fresh()) as memory:
            call()
            numbers[f"{name}: controller and store"] = memory.controller_peak() / nbytes
    with PeakMemory(fresh()) as memory:
        echo()
        numbers["echo: all processes and store"] = memory.total_peak() / nbytes
    return numbers


def group_peaks(fresh: Callable[[], Any], batch: Any) -> dict[str, float]:
    """The `peaks` of a group's calls with a DataProto; ``fresh`` gives the group of a new session."""
    group: Any = None

    def start() -> Sequence[int]:
        nonlocal group
        group = fresh()
        return group.pid()

    return peaks(
        start,
        sum(column.nbytes for column in batch.batch.values()),
        sending=lambda: group.take(batch),
        to_all=lambda: group.weigh(batch),
        echo=lambda: group.echo(batch),
    )


class PeakMemory:
    """Samples the anonymous memory of some processes and the used bytes of /dev/shm while its block runs."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = (os.getpid(), *pids)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._before_own, self._before_others, self._before_store = self._look()
        self._total = self._controller = 0
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def controller_peak(self) -> int:
        """What this process and the store took at most, beyond what they held before."""
        self._note()
        return self._controller

    def total_peak(self) -> int:
        """The same with all processes."""
        self._note()
        return self._total

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL):
            self._note()

    def _note(self) -> None:
        own, others, store = self._look()
        own, store = own - self._before_own, store - self._before_store
        self._controller = max(self._controller, own + store)
        self._total = max(self._total, own + store + others - self._before_others)

    def _look(self) -> tuple[int, int, int]:
        own, *others = map(_anonymous_bytes, self._pids)
        shm = os.statvfs("/dev/shm")
        return own, sum(others), (shm.f_blocks - shm.f_bfree) * shm.f_frsize


def _anonymous_bytes(pid: int) -> int:
    # Not the "private" pages: the store's own are private, too, to the one process that has touched them so far.
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss_Anon"))
