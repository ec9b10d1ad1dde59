"""Kapell groups on Ray: tiny calls, transfers, one argument for all, memory, and start-up."""

from __future__ import annotations

import os
from typing import Any

import ray
import torch

from kapell.decorators import Dispatch, Reduction, register
from kapell.protocol import DataProto
from kapell.ray_backend import RayBackend
from kapell.workergroup import ClassWithInitArgs, Worker

from ..timing import seconds_once, seconds_per_call
from .batches import checked, float_columns
from .memory import PeakMemory
from .ray_session import start_ray


class BenchWorker(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def ping(self) -> int:
        return 1

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(Dispatch.DP_COMPUTE_PROTO)
    def rows(self, batch: DataProto) -> DataProto:
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO)
    def echo(self, batch: DataProto) -> DataProto:
        batch.batch["column_0"][0, 0] += 1  # arrivals are private
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO, collect=Reduction.LIST)
    def take(self, batch: DataProto) -> int:
        return len(batch)

    @register(Dispatch.ONE_TO_ALL)
    def weigh(self, batch: DataProto) -> int:
        return len(batch)


class KapellGroup:
    """A group of ``workers`` that is made anew when their number changes."""

    def __init__(self) -> None:
        start_ray()
        self._backend = RayBackend()
        self._group: Any = None
        self._pool: Any = None

    def make(self, workers: int) -> Any:
        if self._group is None or self._group.world_size != workers:
            self.close()
            self._pool = self._backend.resource_pool([workers])
            self._group = self._backend.worker_group(self._pool, ClassWithInitArgs(BenchWorker), role="bench")
            checked(self._group.ping(), [1] * workers, "ping")
        return self._group

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._pool.close()
            self._group = None


class KapellTiny(KapellGroup):
    def prepare(self, workers: int) -> None:
        self.make(workers)
        self._batch = DataProto.from_dict(tensors={"ids": torch.arange(workers * 2)})
        checked(self._group.rows(self._batch).batch["ids"].tolist(), list(range(workers * 2)), "rows")

    def round(self) -> dict[str, float]:
        return {
            "ping": seconds_per_call(self._group.ping, at_least=0.1),
            "rows": seconds_per_call(lambda: self._group.rows(self._batch), at_least=0.1),
        }


class KapellEcho(KapellGroup):
    def prepare(self, megabytes: int) -> None:
        self.make(4)
        columns = float_columns(megabytes)
        self._batch = DataProto.from_dict(tensors={name: torch.from_numpy(array) for name, array in columns.items()})
        answer = self._group.echo(self._batch)
        checked(bool((answer.batch["column_1"] == self._batch.batch["column_1"]).all()), True, "echo")

    def round(self) -> dict[str, float]:
        return {"echo": seconds_once(lambda: self._group.echo(self._batch))}


class KapellMemory(KapellEcho):
    def prepare(self, megabytes: int) -> None:
        super().prepare(megabytes)
        self._bytes = sum(column.nbytes for column in self._batch.batch.values())
        self._pids = self._group.pid()

    def round(self) -> dict[str, float]:
        with PeakMemory(self._pids) as sending:
            self._group.take(self._batch)
        with PeakMemory(self._pids) as echoing:
            self._group.echo(self._batch)
        return {
            "sending: controller and store": sending.controller / self._bytes,
            "echo: all processes and store": echoing.total / self._bytes,
        }


class KapellToAll(KapellGroup):
    def prepare(self, workers: int) -> None:
        self.make(workers)
        columns = float_columns(64)
        self._batch = DataProto.from_dict(tensors={name: torch.from_numpy(array) for name, array in columns.items()})
        self._bytes = sum(array.nbytes for array in columns.values())
        checked(self._group.weigh(self._batch), [len(self._batch)] * workers, "weigh")

    def round(self) -> dict[str, float]:
        with PeakMemory([]) as memory:
            self._group.weigh(self._batch)
        return {
            "call": seconds_once(lambda: self._group.weigh(self._batch)),
            "controller and store": memory.controller / self._bytes,
        }


class KapellStart:
    """From nothing to the first answer of all workers."""

    def __init__(self) -> None:
        start_ray()
        self._backend = RayBackend()

    def prepare(self, workers: int) -> None:
        self._workers = workers

    def round(self) -> dict[str, float]:
        kept = []

        def start() -> None:
            pool = self._backend.resource_pool([self._workers])
            group = self._backend.worker_group(pool, ClassWithInitArgs(BenchWorker), role="start")
            kept.extend((group, pool))
            group.ping()

        seconds = seconds_once(start)
        for made in kept:
            made.close()
        return {"ready": seconds}


class KapellPut:
    """What one ``ray.put`` of the same bytes takes, as the floor of one argument for all."""

    def __init__(self) -> None:
        start_ray()

    def prepare(self, workers: int) -> None:
        self._columns = float_columns(64)
        self._bytes = sum(array.nbytes for array in self._columns.values())

    def round(self) -> dict[str, float]:
        with PeakMemory([]) as memory:
            ray.put(self._columns)
        return {
            "call": seconds_once(lambda: ray.put(self._columns)),
            "controller and store": memory.controller / self._bytes,
        }
