"""The controller's cost of a call as the group grows to 4,096 ranks: planning, sending, collecting, on a stub backend.

Budget (design, section 8): linear, under 20 microseconds a rank. Of that, what accounting costs is shown by itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from kapell.decorators import Dispatch, register
from kapell.workergroup import RankCall, Worker, WorkerGroup, Workers
from kapell.workergroup.accounting import Ledger
from kapell.workergroup.sizes import size_of

_RANKS = (64, 256, 1024, 4096)
_ROUNDS = 15


class Echo(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, rows: list[int]) -> list[int]:
        return rows

    @register(Dispatch.ONE_TO_ALL)
    def ping(self) -> int:
        return 1


class StubWorkers(Workers[RankCall]):
    """Every rank answers at once with its first argument."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    @property
    def world_size(self) -> int:
        return self._world_size

    def put(self, value: Any, num_readers: int) -> Any:
        return value

    def submit(self, call: RankCall) -> RankCall:
        return call

    def wait(self, handles: Sequence[RankCall], timeout: float | None) -> list[RankCall]:
        return list(handles)

    def fetch(self, handle: RankCall) -> Any:
        return handle.args[0] if handle.args else 1

    def is_alive(self, rank: int) -> bool:
        return True

    def restart(self, rank: int) -> None:
        pass

    def close(self) -> None:
        pass


def _median(call) -> float:
    seconds = []
    for _ in range(_ROUNDS):
        began = time.thread_time()  # of this thread: other work on the machine does not count
        call()
        seconds.append(time.thread_time() - began)
    return statistics.median(seconds)


def accounting(num_ranks: int) -> None:
    """What the accounting of one call does, alone."""
    ledger = Ledger()
    record = ledger.open("role", "method", time.time(), range(num_ranks))
    for rank in range(num_ranks):
        record.sending.append(time.time())
        record.bytes_in[rank] = size_of([1])
        began = time.perf_counter()
        record.bytes_out[rank] = size_of([1])
        record.collect[rank] = time.perf_counter() - began
    record.sending.append(time.time())
    record.end()


def main() -> None:
    print(f"{'ranks':>6} {'rows: us/call':>14} {'us/rank':>8} {'ping: us/rank':>14} {'accounting: us/rank':>20}")
    for num_ranks in _RANKS:
        group = WorkerGroup(StubWorkers(num_ranks), Echo)
        rows = list(range(num_ranks))
        assert group.rows(rows) == rows
        call = _median(lambda group=group, rows=rows: group.rows(rows)) * 1e6
        ping = _median(group.ping) * 1e6
        own = _median(lambda num_ranks=num_ranks: accounting(num_ranks)) * 1e6
        print(
            f"{num_ranks:>6} {call:>14.0f} {call / num_ranks:>8.2f} {ping / num_ranks:>14.2f} {own / num_ranks:>20.2f}"
        )


if __name__ == "__main__":
    main()
