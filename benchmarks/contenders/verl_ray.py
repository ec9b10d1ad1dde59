"""verl's worker groups doing the same."""

from __future__ import annotations

import os
from typing import Any

import ray
import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from ..timing import seconds_once, seconds_per_call
from .batches import checked, float_columns, small_columns
from .memory import group_peaks
from .ray_session import restart_ray, start_ray


class BenchWorker(Worker):
    def __init__(self) -> None:
        super().__init__()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ping(self) -> int:
        return 1

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, batch: DataProto) -> DataProto:
        batch.batch["column_0"][0, 0] += 1
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def take(self, batch: DataProto) -> DataProto:
        return batch.select(batch_keys=["mark"])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weigh(self, batch: DataProto) -> int:
        return len(batch)


RemoteWorker = ray.remote(BenchWorker)


class VerlGroup:
    def __init__(self) -> None:
        start_ray()
        self._group: Any = None
        self._pool: Any = None

    def make(self, workers: int) -> Any:
        if self._group is None or self._group.world_size != workers:
            self.close()
            self._pool, self._group = _start(workers)
        return self._group

    def close(self) -> None:
        if self._group is not None:
            _end(self._pool, self._group)
            self._group = None


class VerlTiny(VerlGroup):
    def prepare(self, workers: int) -> None:
        self.make(workers)
        self._batch = DataProto.from_dict(tensors={"ids": torch.arange(workers * 2)})
        checked(self._group.rows(self._batch).batch["ids"].tolist(), list(range(workers * 2)), "rows")
        tensors, objects = small_columns(workers * 2)
        self._columns = DataProto.from_dict(tensors=tensors, non_tensors=objects)
        checked(self._group.rows(self._columns).non_tensor_batch["uid"].tolist(), objects["uid"].tolist(), "columns")

    def round(self) -> dict[str, float]:
        return {
            "ping": seconds_per_call(self._group.ping, at_least=0.1),
            "rows": seconds_per_call(lambda: self._group.rows(self._batch), at_least=0.1),
            "rows of six columns": seconds_per_call(lambda: self._group.rows(self._columns), at_least=0.1),
        }


class VerlEcho(VerlGroup):
    def prepare_batch(self, megabytes: int) -> None:
        columns = float_columns(megabytes)
        tensors = {name: torch.from_numpy(array) for name, array in columns.items()}
        self._batch = DataProto.from_dict(tensors={**tensors, "mark": torch.zeros(len(columns["column_0"]))})

    def prepare(self, megabytes: int) -> None:
        self.make(4)
        self.prepare_batch(megabytes)
        answer = self._group.echo(self._batch)
        checked(bool((answer.batch["column_1"] == self._batch.batch["column_1"]).all()), True, "echo")

    def round(self) -> dict[str, float]:
        return {"echo": seconds_once(lambda: self._group.echo(self._batch))}


class VerlMemory(VerlEcho):
    def prepare(self, megabytes: int) -> None:
        self.prepare_batch(megabytes)

    def round(self) -> dict[str, float]:
        return group_peaks(self._fresh, self._batch)

    def _fresh(self) -> Any:
        self._group = None
        restart_ray()
        return self.make(4)


class VerlToAll(VerlGroup):
    def prepare(self, workers: int) -> None:
        self.make(workers)
        columns = float_columns(64)
        self._batch = DataProto.from_dict(tensors={name: torch.from_numpy(array) for name, array in columns.items()})

    def round(self) -> dict[str, float]:
        return {"call": seconds_once(lambda: self._group.weigh(self._batch))}


class VerlStart:
    def __init__(self) -> None:
        start_ray()

    def prepare(self, workers: int) -> None:
        self._workers = workers

    def round(self) -> dict[str, float]:
        kept: list[Any] = []

        def start() -> None:
            kept.extend(_start(self._workers))
            kept[1].ping()

        seconds = seconds_once(start)
        _end(*kept)
        return {"ready": seconds, "ready, workers import torch": seconds}  # every verl worker imports torch


def _start(workers: int) -> tuple[Any, Any]:
    pool = RayResourcePool([workers], use_gpu=False, max_colocate_count=1)
    return pool, RayWorkerGroup(resource_pool=pool, ray_cls_with_init=RayClassWithInitArgs(cls=RemoteWorker))


def _end(pool: Any, group: Any) -> None:
    for worker in group.workers:
        ray.kill(worker)
    for placement in pool.get_placement_groups():
        ray.util.remove_placement_group(placement)
