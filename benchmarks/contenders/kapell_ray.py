"""Kapell groups on Ray: tiny calls, transfers, one argument for all, memory, and start-up."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Literal

import numpy as np
import ray
import torch

from kapell.decorators import Dispatch, Reduction, register
from kapell.protocol import DataProto, release_spare_memory
from kapell.ray_backend import RayBackend
from kapell.workergroup import ClassWithInitArgs, Worker

from ..timing import seconds_once, seconds_per_call
from .batches import checked, float_columns, small_columns
from .light_workers import LightWorker
from .memory import group_peaks
from .ray_session import restart_ray, start_ray


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

    @register(Dispatch.DP_COMPUTE_PROTO)
    def make(self, megabytes: list[int]) -> DataProto:
        """This rank's rows of a batch of so many megabytes."""
        columns = float_columns(megabytes[0])
        mine = np.array_split(np.arange(len(columns["column_0"])), self.world_size)[self.rank]
        return DataProto.from_dict(tensors={name: torch.from_numpy(array[mine]) for name, array in columns.items()})

    @register(Dispatch.DP_COMPUTE_PROTO, collect=Reduction.LIST)
    def take(self, batch: DataProto) -> int:
        return len(batch)

    @register(Dispatch.ONE_TO_ALL)
    def weigh(self, batch: DataProto) -> int:
        return len(batch)


class KapellGroup:
    """A group of ``workers`` that is made anew when their number changes."""

    group_options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        start_ray()
        self._backend = RayBackend()
        self._group: Any = None
        self._pool: Any = None

    def make(self, workers: int) -> Any:
        if self._group is None or self._group.world_size != workers:
            self.close()
            self._pool = self._backend.resource_pool([workers])
            self._group = self._backend.worker_group(
                self._pool, ClassWithInitArgs(BenchWorker), role="bench", **self.group_options
            )
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
        tensors, objects = small_columns(workers * 2)
        self._columns = DataProto.from_dict(tensors=tensors, non_tensors=objects)
        checked(self._group.rows(self._columns).non_tensor_batch["uid"].tolist(), objects["uid"].tolist(), "columns")

    def round(self) -> dict[str, float]:
        return {
            "ping": seconds_per_call(self._group.ping, at_least=0.1),
            "rows": seconds_per_call(lambda: self._group.rows(self._batch), at_least=0.1),
            "rows of six columns": seconds_per_call(lambda: self._group.rows(self._columns), at_least=0.1),
        }


class KapellEcho(KapellGroup):
    def prepare_batch(self, megabytes: int) -> None:
        columns = float_columns(megabytes)
        self._batch = DataProto.from_dict(tensors={name: torch.from_numpy(array) for name, array in columns.items()})

    def prepare(self, megabytes: int) -> None:
        self.make(4)
        self.prepare_batch(megabytes)
        answer = self._group.echo(self._batch)
        checked(bool((answer.batch["column_1"] == self._batch.batch["column_1"]).all()), True, "echo")

    def round(self) -> dict[str, float]:
        return {"echo": seconds_once(lambda: self._group.echo(self._batch))}


class KapellEchoViews(KapellEcho):
    """Workers read what arrives where it lies; joining is the one copy here."""

    group_options: ClassVar[dict[str, Any]] = {"arrivals": "read-only"}

    def prepare(self, megabytes: int) -> None:
        group = self.make(4)
        self.prepare_batch(megabytes)
        answer = group.rows(self._batch)
        checked(bool((answer.batch["column_1"] == self._batch.batch["column_1"]).all()), True, "echo")

    def round(self) -> dict[str, float]:
        return {"echo": seconds_once(lambda: self._group.rows(self._batch))}


class KapellChain(KapellGroup):
    """A batch that workers make, through two more calls.

    It goes on as a future, ``by reference``, or is fetched and sent again, ``by value``.
    """

    def __init__(self, way: Literal["future", "reference", "value"]) -> None:
        super().__init__()
        self._way = way

    def prepare(self, megabytes: int) -> None:
        self._megabytes = megabytes
        self.make(2)
        checked(sum(self._chain()), len(float_columns(megabytes)["column_0"]), "chain")

    def _chain(self) -> list[int]:
        group = self._group.by_reference() if self._way == "reference" else self._group
        make, rows = group.make, group.rows
        if self._way == "future":
            make, rows = make.options(blocking=False), rows.options(blocking=False)
        return self._group.take(rows(make([self._megabytes] * self._group.world_size)))

    def _through(self) -> int:
        return sum(method.sent + method.fetched for method in self._group.stats().methods)

    def round(self) -> dict[str, float]:
        before = self._through()
        return {"chain": seconds_once(self._chain), "bytes through the controller": self._through() - before}


class KapellMemory(KapellEcho):
    def prepare(self, megabytes: int) -> None:
        self.prepare_batch(megabytes)

    def round(self) -> dict[str, float]:
        return group_peaks(self._fresh, self._batch)

    def _fresh(self) -> Any:
        self.close()
        restart_ray()
        release_spare_memory()  # so that it counts anew
        return self.make(4)


class KapellToAll(KapellGroup):
    def prepare(self, workers: int) -> None:
        self.make(workers)
        columns = float_columns(64)
        self._batch = DataProto.from_dict(tensors={name: torch.from_numpy(array) for name, array in columns.items()})
        checked(self._group.weigh(self._batch), [len(self._batch)] * workers, "weigh")

    def round(self) -> dict[str, float]:
        return {"call": seconds_once(lambda: self._group.weigh(self._batch))}


class KapellStart:
    """From nothing to the first answer of all workers."""

    def __init__(self) -> None:
        start_ray()
        self._backend = RayBackend()

    def prepare(self, workers: int) -> None:
        self._workers = workers

    def round(self) -> dict[str, float]:
        return {"ready": self._start(LightWorker), "ready, workers import torch": self._start(BenchWorker)}

    def _start(self, worker_class: type) -> float:
        kept = []

        def start() -> None:
            pool = self._backend.resource_pool([self._workers])
            group = self._backend.worker_group(pool, ClassWithInitArgs(worker_class), role="start")
            kept.extend((group, pool))
            group.ping()

        seconds = seconds_once(start)
        for made in kept:
            made.close()
        return seconds


class KapellPut:
    """What one ``ray.put`` of the same bytes takes, as the floor of one argument for all."""

    def __init__(self) -> None:
        start_ray()

    def prepare(self, workers: int) -> None:
        self._columns = float_columns(64)

    def round(self) -> dict[str, float]:
        return {"call": seconds_once(lambda: ray.put(self._columns))}
