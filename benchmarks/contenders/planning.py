"""The controller's cost of a call on a group whose workers answer at once: planning, sending, collecting."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from kapell.decorators import Dispatch, GroupShape, MeshLayout, MethodSpec, karmarkar_karp, make_plan, register
from kapell.protocol import DataProto
from kapell.workergroup import RankCall, Worker, WorkerGroup, Workers
from kapell.workergroup.accounting import Ledger
from kapell.workergroup.sizes import size_of

from .batches import checked
from .planning_data import make_batch

_TENSOR_PARALLEL = 8
_NUM_ROWS = 1_000_000


class Echo(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO)
    def rows(self, rows: Any) -> Any:
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


class KapellCalls:
    """Whole calls on the stub group."""

    def prepare(self, ranks: int) -> None:
        self._ranks = ranks
        self._group = WorkerGroup(StubWorkers(ranks), Echo)
        self._list = list(range(ranks))
        self._batch = make_batch(DataProto, ranks)
        checked(self._group.rows(self._list), self._list, "rows")
        checked(len(self._group.rows(self._batch)), len(self._batch), "batch")

    def round(self) -> dict[str, float]:
        group, ranks = self._group, self._ranks
        return {
            "call with a list, per rank": _thread_seconds(lambda: group.rows(self._list)) / ranks,
            "ping, per rank": _thread_seconds(group.ping) / ranks,
            "call with a DataProto, per rank": _thread_seconds(lambda: group.rows(self._batch)) / ranks,
        }


class Accounting:
    """What the accounting of one call does, alone; part of every call."""

    def prepare(self, ranks: int) -> None:
        self._ranks = ranks

    def round(self) -> dict[str, float]:
        return {"call with a list, per rank": _thread_seconds(self._account) / self._ranks}

    def _account(self) -> None:
        record = Ledger().open("role", "method", time.time(), range(self._ranks))
        for rank in range(self._ranks):
            record.sending.append(time.time())
            record.bytes_in[rank] = size_of([1])
            began = time.perf_counter()
            record.bytes_out[rank] = size_of([1])
            record.collect[rank] = time.perf_counter() - began
        record.sending.append(time.time())
        record.end()


class KapellPlans:
    """Planning alone, of a million rows of ``kind``: by rank, by a mesh with tensor parallelism, and cutting."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def prepare(self, ranks: int) -> None:
        peers = min(_TENSOR_PARALLEL, ranks)
        layout = MeshLayout(
            tuple(rank // peers for rank in range(ranks)), tuple(rank % peers == 0 for rank in range(ranks))
        )
        self._shape = GroupShape(ranks, meshes={"actor": layout})
        tokens = torch.zeros(_NUM_ROWS, 4, dtype=torch.int32)
        kinds = {
            "tensor": tokens,
            "TensorDict": TensorDict({"tokens": tokens}, [_NUM_ROWS]),
            "numpy": np.zeros(_NUM_ROWS),
            "list": list(range(_NUM_ROWS)),
        }
        self._batch = kinds[self._kind]

    def _plan(self, mode: Any = Dispatch.DP_COMPUTE_PROTO) -> Any:
        return make_plan("update", MethodSpec(dispatch_mode=mode), self._shape, (self._batch, {"lr": 1e-6}))

    def round(self) -> dict[str, float]:
        tracemalloc.start()
        self._plan()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        planned = self._plan()
        return {
            "plan": _thread_seconds(self._plan),
            "plan by mesh": _thread_seconds(lambda: self._plan(Dispatch.mesh("actor"))),
            "plan's memory": peak,
            "cutting all shards": _thread_seconds(lambda: sum(1 for _ in planned.arguments[0].values)),
        }


class KapellBalance:
    """Balancing rows of different lengths over ranks by Karmarkar-Karp, in equal numbers."""

    def prepare(self, rows: int, ranks: int) -> None:
        self._lengths = np.random.default_rng(0).integers(100, 8000, rows).tolist()
        self._ranks = ranks

    def round(self) -> dict[str, float]:
        return {"balance": _thread_seconds(lambda: karmarkar_karp(self._lengths, self._ranks, equal_size=True))}


def _thread_seconds(call: Callable[[], object]) -> float:
    """Processor seconds of this thread: other work on the machine does not count."""
    began = time.thread_time()
    call()
    return time.thread_time() - began
