"""Calls functions that may hang, each for so long and no longer."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

__all__ = ["TimeIsUp", "time_limit"]


class TimeIsUp(BaseException):
    """Raised inside the function; not an Exception, so that its own handlers let it pass."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


@contextmanager
def time_limit(seconds: float | None) -> Generator[Callable[[Callable[[], Any]], Any]]:
    """For the block, a function that gives what a call returns, and raises `TimeIsUp` for one above so many seconds.

    In the main thread a signal interrupts the call. Elsewhere it runs in a thread of its own, which is left behind,
    since Python cannot end one.
    """
    if seconds is None:
        yield lambda call: call()
    elif threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
        with _alarm(seconds) as ring:
            yield partial(_call_until_alarm, seconds, ring)
    else:
        yield partial(_call_in_thread, seconds)


def _call_until_alarm(seconds: float, ring: Callable[[int, Any], None], call: Callable[[], Any]) -> Any:
    if signal.getsignal(signal.SIGALRM) is not ring:  # an earlier call set its own
        signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _call_in_thread(seconds: float, call: Callable[[], Any]) -> Any:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="kapell-call", daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # the function's own
            raise
        raise TimeIsUp(seconds) from None


@contextmanager
def _alarm(seconds: float) -> Generator[Callable[[int, Any], None]]:
    def ring(_number: int, _frame: Any) -> None:
        raise TimeIsUp(seconds)

    previous_handler = signal.signal(signal.SIGALRM, ring)
    previous_timer = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield ring
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)
        signal.setitimer(signal.ITIMER_REAL, *previous_timer)
