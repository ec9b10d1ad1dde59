"""Running the async methods of a worker in a process that has no event loop of its own, or whose caller has one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

__all__ = ["WorkerLoop"]


class WorkerLoop:
    """One event loop a worker, kept over its calls: locks and queues of async methods live as long as the worker."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end, in the context of the caller."""
        context = copy_context()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._runner.run(coroutine, context=context)
        # The caller itself runs in an event loop: no second one can run in its thread.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._runner.run, coroutine, context=context).result()

    def close(self) -> None:
        """Close the loop. Harmless when repeated."""
        self._runner.close()
