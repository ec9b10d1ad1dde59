"""verl's dispatch and collect of the same calls, on a group that answers at once."""

from __future__ import annotations

import time

from verl import DataProto
from verl.single_controller.base.decorator import collect_dp_compute_data_proto, dispatch_dp_compute_data_proto
from verl.single_controller.base.worker_group import WorkerGroup

from .planning_data import make_batch


class StubGroup(WorkerGroup):
    def __init__(self, world_size: int) -> None:
        self._size = world_size

    @property
    def world_size(self) -> int:
        return self._size


class VerlCalls:
    """What verl's controller does in a call besides Ray's part: split, one argument tuple a rank, join."""

    def prepare(self, ranks: int) -> None:
        self._ranks = ranks
        self._group = StubGroup(ranks)
        self._batch = make_batch(DataProto, ranks)

    def round(self) -> dict[str, float]:
        began = time.thread_time()
        args, _ = dispatch_dp_compute_data_proto(self._group, self._batch)
        outputs = [args[0][rank] for rank in range(self._ranks)]
        collect_dp_compute_data_proto(self._group, outputs)
        return {"call with a DataProto, per rank": (time.thread_time() - began) / self._ranks}
