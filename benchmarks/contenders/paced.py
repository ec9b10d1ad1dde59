"""Training loops that own their thread, let through one step at a time so that contenders can alternate."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["PacedLoop"]


class LoopEnded(BaseException):
    """The measurement is over; unwinds the training loop. Not an ``Exception``: no hook may swallow it."""


class PacedLoop:
    """Runs ``loop(step_done)`` on a thread; the loop calls ``step_done()`` after each step and waits there."""

    def __init__(self, loop: Callable[[Callable[[], None]], object]) -> None:
        self._go = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, args=(loop,), daemon=True)
        self._thread.start()

    def step(self) -> None:
        """Let one step through and wait for its end. Raises what the loop raised."""
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise RuntimeError("the training loop failed") from self._error

    def close(self) -> None:
        """End the loop after its last step."""
        self._closing = True
        self._go.release()
        self._thread.join(timeout=60)

    def _run(self, loop: Callable[[Callable[[], None]], object]) -> None:
        try:
            self._go.acquire()
            if not self._closing:
                loop(self._step_done)
        except LoopEnded:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._done.release()

    def _step_done(self) -> None:
        self._done.release()
        self._go.acquire()
        if self._closing:
            raise LoopEnded
