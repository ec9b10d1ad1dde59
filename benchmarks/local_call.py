"""Kapell's own cost of a tiny data-parallel call on the local backend, with 4 workers.

Budget (design, section 8): under 100 microseconds. Compares with calling the four methods by hand on four objects.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kapell.decorators import Dispatch, register
from kapell.workergroup import ClassWithInitArgs, LocalWorkerGroup, ResourcePool, Worker

_CALLS = 10
_ROUNDS = 1000


class Adder(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, rows: list[int]) -> list[int]:
        return [row + 1 for row in rows]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ping(self) -> int:
        return 1


def microseconds(call: Callable[[], object]) -> float:
    """The fastest of many short rounds: what other programs on the machine take is not the call's."""
    rounds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for _ in range(_CALLS):
            call()
        rounds.append((time.perf_counter() - began) / _CALLS * 1e6)
    return min(rounds)


def main() -> None:
    rows = list(range(8))
    print(f"speed of this machine now: sum(range(20_000)) takes {microseconds(lambda: sum(range(20_000))):.0f} us")
    for mode in ("serial", "threads"):
        with LocalWorkerGroup(ResourcePool([4]), ClassWithInitArgs(Adder), mode=mode) as group:
            assert group.add(rows) == [row + 1 for row in rows]
            by_hand = [object.__new__(Adder) for _ in range(4)]
            shards = [rows[2 * i : 2 * i + 2] for i in range(4)]

            def plain(by_hand=by_hand, shards=shards) -> list[int]:
                return [row for worker, shard in zip(by_hand, shards, strict=True) for row in worker.add(shard)]

            own = microseconds(lambda group=group: group.add(rows)) - microseconds(plain)
            ping = microseconds(group.ping)
            print(f"{mode:8} 4 workers: add {own:7.1f} us over plain calls, ping {ping:7.1f} us")


if __name__ == "__main__":
    main()
