"""A worker that needs no torch: what a start costs when the worker's own imports do not hide it."""

from __future__ import annotations

from kapell.decorators import Dispatch, register
from kapell.workergroup import Worker


class LightWorker(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def ping(self) -> int:
        return 1
