"""Calls a function that may hang, for so long and no longer."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

__all__ = ["TimeIsUp", "within"]


class TimeIsUp(BaseException):
    """Raised inside the function; not an Exception, so that its own handlers let it pass."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


def within(seconds: float | None, call: Callable[[], Any]) -> Any:
    """What the call returns. Raises `TimeIsUp` after so many seconds.

    In the main thread a signal interrupts it. Elsewhere it runs in a thread of its own, which is left behind, since
    Python cannot end one.
    """
    if seconds is None:
        return call()
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
        with _alarm(seconds):
            return call()
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
def _alarm(seconds: float) -> Generator[None]:
    def ring(_number: int, _frame: Any) -> None:
        raise TimeIsUp(seconds)

    previous_handler = signal.signal(signal.SIGALRM, ring)
    previous_timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)
        signal.setitimer(signal.ITIMER_REAL, *previous_timer)
