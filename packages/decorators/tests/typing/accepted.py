"""The type checker must accept this file: labels keep types."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import assert_type

from kapell.decorators import (
    Dispatch,
    DispatchPlan,
    Execute,
    GroupShape,
    MethodSpec,
    Reduction,
    Uneven,
    make_nd_compute_dataproto_dispatch_fn,
    make_plan,
    register,
    spec_of,
)


class Worker:
    @register(Dispatch.DP_COMPUTE_PROTO, reads=["a"], writes=("b",), uneven="pad", balance_by="a")
    def update(self, batch: list[int], *, scale: float = 1.0) -> list[float]:
        return [scale * row for row in batch]

    @register(dispatch_mode=Dispatch.mesh("actor"), execute_mode=Execute.ALL, blocking=False)
    async def fetch(self, row: int) -> str:
        return str(row)

    @register(make_nd_compute_dataproto_dispatch_fn("actor"), collect=Reduction.MEAN, uneven=Uneven.REFUSE)
    def stream(self, rows: list[int]) -> Iterator[int]:
        yield from rows

    @register({"dispatch_fn": lambda group, x: (([x],), {}), "collect_fn": lambda group, outputs: outputs})
    async def stream_slowly(self, rows: list[int]) -> AsyncIterator[int]:
        for row in rows:
            yield row

    @classmethod
    @register("ONE_TO_ALL")
    def of_class(cls, x: int) -> int:
        return x

    @register(Dispatch.ONE_TO_ALL, balance_by=None)
    @staticmethod
    def of_nobody(x: int) -> int:
        return x


worker = Worker()
assert_type(worker.update([1], scale=2.0), list[float])
assert_type(Worker.of_class(1), int)
assert_type(Worker.of_nobody(1), int)
assert_type(worker.stream([1]), Iterator[int])
assert_type(spec_of(Worker.update), MethodSpec | None)
assert_type(make_plan("update", MethodSpec(), GroupShape(2), ([1],)), DispatchPlan)
pending: Awaitable[str] = worker.fetch(1)
function: Callable[[list[int]], list[float]] = worker.update
registered: Dispatch = Dispatch.MY_OWN_MODE
