"""Kapell's own cost of a tiny data-parallel call in one process, in processor time: other work does not count."""

from __future__ import annotations

import time
from collections.abc import Callable

from kapell.decorators import Dispatch, register
from kapell.workergroup import ClassWithInitArgs, LocalWorkerGroup, ResourcePool, Worker

from .batches import checked

_ROWS = list(range(8))
_CALLS = 200


class Adder(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO)
    def add(self, rows: list[int]) -> list[int]:
        return [row + 1 for row in rows]

    @register(Dispatch.ONE_TO_ALL)
    def ping(self) -> int:
        return 1


class LocalCalls:
    """A group of the local backend. What plain calls of the same methods take is subtracted."""

    def __init__(self, mode: str) -> None:
        self._mode = mode

    def prepare(self, workers: int) -> None:
        self._group = LocalWorkerGroup(ResourcePool([workers]), ClassWithInitArgs(Adder), mode=self._mode)
        self._by_hand = PlainCalls()
        self._by_hand.prepare(workers)
        checked(self._group.add(_ROWS), [row + 1 for row in _ROWS], "add")

    def round(self) -> dict[str, float]:
        plain = self._by_hand.round()
        add = _processor_seconds(lambda: self._group.add(_ROWS))
        return {"add": add - plain["add"], "ping": _processor_seconds(self._group.ping) - plain["ping"]}

    def close(self) -> None:
        self._group.close()


class PlainCalls:
    """The methods called by hand on as many objects."""

    def prepare(self, workers: int) -> None:
        self._workers = [object.__new__(Adder) for _ in range(workers)]
        size = max(1, len(_ROWS) // workers)
        self._shards = [_ROWS[size * i : size * i + size] for i in range(workers)]

    def round(self) -> dict[str, float]:
        def add() -> list[int]:
            pairs = zip(self._workers, self._shards, strict=True)
            return [row for worker, shard in pairs for row in worker.add(shard)]

        return {
            "add": _processor_seconds(add),
            "ping": _processor_seconds(lambda: [worker.ping() for worker in self._workers]),
            "speed of the machine: sum(range(20,000))": _processor_seconds(lambda: sum(range(20_000))),
        }


def _processor_seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    for _ in range(_CALLS):
        call()
    return (time.process_time() - began) / _CALLS
