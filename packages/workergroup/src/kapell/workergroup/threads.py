"""In-process workers on threads: one daemon thread per worker, so that ranks run side by side and can be waited for."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

from .answering import CallRunner
from .errors import BusyRank, CallTimeoutError, LostWorker
from .failures import FAILURE_GRACE_SECONDS, failed_start
from .pool import ClassWithInitArgs
from .serial import Answer, LocalWorkers, private_arguments
from .workers import RankCall

__all__ = ["ThreadWorkers"]

_START_SECONDS = 1800.0  # for the constructors: loading a large model takes minutes
_EXIT_SECONDS = 5.0  # how long a program that ends waits for calls under way

_Job = tuple[Answer, Callable[..., Any], tuple[Any, ...]]


class ThreadWorkers(LocalWorkers):
    """A lost worker's thread is abandoned, and what it was doing counts as lost at once."""

    def __init__(self, role: str, cls_with_init: ClassWithInitArgs, envs: Sequence[Mapping[str, str]]) -> None:
        self._changed = threading.Condition()
        self._lines = [_Line() for _ in envs]
        super().__init__(role, cls_with_init, envs)

    def submit(self, call: RankCall) -> Answer:
        """Queue the call for its worker's thread."""
        return self._queue(call.rank, self._run, call, *private_arguments(call))

    def wait(self, handles: Sequence[Answer], timeout: float | None) -> list[Answer]:
        """Those that are done, as soon as one is."""
        with self._changed:
            self._changed.wait_for(lambda: any(handle.done for handle in handles), _bounded(timeout))
            return [handle for handle in handles if handle.done]

    def fetch_all(self, handles: Sequence[Answer], timeout: float | None) -> list[Any] | None:
        """All results; None as soon as one failed, or when the time is over."""
        with self._changed:
            self._changed.wait_for(
                lambda: all(handle.done for handle in handles) or any(handle.error for handle in handles),
                _bounded(timeout),
            )
            if all(handle.done and handle.error is None for handle in handles):
                return [handle.value for handle in handles]
            return None

    def lose(self, rank: int) -> None:
        """Act as if the worker's process had died."""
        super().lose(rank)
        self._abandon(rank, f"rank {rank} of {self._role} was lost; restart it")

    def restart(self, rank: int) -> None:
        """Build the worker anew, on a new thread."""
        super().lose(rank)
        self._abandon(rank, f"rank {rank} of {self._role} was restarted")
        answer = self._queue(rank, self._build, rank)
        if not self.wait([answer], _START_SECONDS):
            raise self._late({rank: answer}, time.time() - _START_SECONDS)
        self._runners[rank] = self.fetch(answer)

    def close(self) -> None:
        """End the threads; one that is in a call ends after it, or with the program."""
        super().close()
        for rank in range(len(self._lines)):
            self._abandon(rank, f"group {self._role} was closed", last=True)

    def _build_all(self) -> None:
        began = time.time()
        answers = {rank: self._queue(rank, self._build, rank) for rank in range(self.world_size)}
        if self.fetch_all(list(answers.values()), _START_SECONDS) is None:
            deadline = time.monotonic() + FAILURE_GRACE_SECONDS
            with self._changed:
                self._changed.wait_for(
                    lambda: all(answer.done for answer in answers.values()), deadline - time.monotonic()
                )
        failures = {rank: self._error_of(answer) for rank, answer in answers.items() if answer.error is not None}
        if failures:
            raise failed_start(self._role, self.world_size, failures)
        if late := {rank: answer for rank, answer in answers.items() if not answer.done}:
            raise self._late(late, began)
        for rank, answer in answers.items():
            self._runners[rank] = answer.value

    def _late(self, late: Mapping[int, Answer], began: float) -> CallTimeoutError:
        busy = {rank: BusyRank(began, time.time() - began, "__init__") for rank in late}
        return CallTimeoutError(self._role, "__init__", _START_SECONDS, busy, {})

    def _end(self, rank: int, runner: CallRunner) -> None:
        # By its own thread: the loop may be running there.
        self._queue(rank, runner.close)

    def _queue(self, rank: int, function: Callable[..., Any], *args: Any) -> Answer:
        answer = Answer()
        line = self._lines[rank]
        with self._changed:
            line.unanswered.add(answer)
        if line.thread is None:
            line.thread = threading.Thread(
                target=self._serve, args=(rank, line), name=f"{self._role}-rank-{rank}", daemon=True
            )
            line.thread.start()
            _running.add(line)
        line.jobs.put((answer, function, args))
        return answer

    def _serve(self, rank: int, line: _Line) -> None:
        while (job := line.jobs.get()) is not None:
            answer, function, args = job
            private = Answer()
            self._answer(private, rank, function, *args)
            with self._changed:
                if answer in line.unanswered:
                    line.unanswered.discard(answer)
                    answer.value, answer.error, answer.done = private.value, private.error, True
                    self._changed.notify_all()
            del job, answer, function, args, private  # a big batch must not live until the next call

    def _abandon(self, rank: int, reason: str, *, last: bool = False) -> None:
        """Count everything in a line as lost, and begin a new one."""
        line = self._lines[rank]
        with self._changed:
            for answer in line.unanswered:
                answer.error, answer.done = LostWorker(reason), True
            line.unanswered.clear()
            self._changed.notify_all()
        line.jobs.put(None)
        if not last:
            self._lines[rank] = _Line()


class _Line:
    """The calls of one worker, waiting for its thread."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self.unanswered: set[Answer] = set()
        self.thread: threading.Thread | None = None


_running: WeakSet[_Line] = WeakSet()


@atexit.register
def _let_calls_end() -> None:
    """Python ends daemon threads where they are; in C++ code, such as torch's, that would abort the process."""
    deadline = time.monotonic() + _EXIT_SECONDS
    lines = list(_running)
    for line in lines:
        line.jobs.put(None)
    for line in lines:
        if line.thread is not None:
            line.thread.join(max(0.0, deadline - time.monotonic()))


def _bounded(timeout: float | None) -> float | None:
    return None if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX)
