"""The type checker must reject each line that ends in the mark, and no other."""

from kapell.decorators import Dispatch, GroupShape, MeshLayout, MethodSpec, PerWorker, make_plan, register


class Worker:
    @register(Dispatch.DP_COMPUTE_PROTO)
    def update(self, batch: list[int], *, scale: float = 1.0) -> list[float]:
        return [scale * row for row in batch]


worker = Worker()
worker.update()  # wrong
worker.update("text")  # wrong
worker.update([1], scales=2.0)  # wrong
result: list[str] = worker.update([1])  # wrong
register(dispatch_mode=3)  # wrong
register(execute_mode="all")  # wrong
register(balance=True)  # wrong
register()(3)  # wrong
make_plan("update", Dispatch.ONE_TO_ALL, GroupShape(2))  # wrong
MethodSpec(blocking="no")  # wrong
MeshLayout(dp_ranks="0011", collect=(True,))  # wrong
PerWorker(3)  # wrong
MethodSpec().blocking = False  # wrong
