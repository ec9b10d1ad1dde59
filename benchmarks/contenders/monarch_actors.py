"""Monarch's actor meshes doing the same, with numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from monarch.actor import Actor, endpoint, this_host

from ..timing import seconds_once, seconds_per_call
from .batches import checked, float_columns, small_arrays

Columns = dict[str, np.ndarray]


class MeshActor(Actor):
    @endpoint
    def ping(self) -> int:
        return 1

    @endpoint
    def rows(self, ids: Any) -> Any:
        return ids

    @endpoint
    def echo(self, columns: Columns) -> Columns:
        own = {name: np.array(array) for name, array in columns.items()}
        own["column_0"][0, 0] += 1
        return own

    @endpoint
    def weigh(self, columns: Columns) -> int:
        return len(columns["column_0"])


class Mesh:
    """A mesh that is made anew when its size changes."""

    def __init__(self) -> None:
        self._size = 0
        self._processes: Any = None
        self._actors: Any = None
        self._ranks: list[Any] = []

    def make(self, workers: int) -> None:
        if self._size != workers:
            self.close()
            self._processes = this_host().spawn_procs(per_host={"gpus": workers})
            self._actors = self._processes.spawn("bench", MeshActor)
            self._actors.ping.call().get()
            self._ranks = [self._actors.slice(gpus=rank) for rank in range(workers)]
            self._size = workers

    def scatter(self, endpoint_name: str, parts: list[Any]) -> list[Any]:
        futures = [getattr(rank, endpoint_name).call_one(part) for rank, part in zip(self._ranks, parts, strict=True)]
        return [future.get() for future in futures]

    def echo_of(self, endpoint_name: str, columns: Columns) -> Columns:
        parts = {name: np.array_split(array, self._size) for name, array in columns.items()}
        sent = [{name: parts[name][rank] for name in parts} for rank in range(self._size)]
        answers = self.scatter(endpoint_name, sent)
        return {name: np.concatenate([answer[name] for answer in answers]) for name in parts}

    def close(self) -> None:
        if self._processes is not None:
            self._processes.stop().get()
            self._processes, self._size = None, 0


class MeshTiny(Mesh):
    def prepare(self, workers: int) -> None:
        self.make(workers)
        self._ids = np.arange(workers * 2)
        checked(self._rows().tolist(), self._ids.tolist(), "rows")
        self._columns = small_arrays(workers * 2)
        checked(self._rows_of_columns()["uid"].tolist(), self._columns["uid"].tolist(), "columns")

    def _rows_of_columns(self) -> Columns:
        return self.echo_of("rows", self._columns)

    def _rows(self) -> np.ndarray:
        return np.concatenate(self.scatter("rows", np.array_split(self._ids, self._size)))

    def round(self) -> dict[str, float]:
        return {
            "ping": seconds_per_call(lambda: self._actors.ping.call().get(), at_least=0.1),
            "rows": seconds_per_call(self._rows, at_least=0.1),
            "rows of six columns": seconds_per_call(self._rows_of_columns, at_least=0.1),
        }


class MeshEcho(Mesh):
    def prepare(self, megabytes: int) -> None:
        self.make(4)
        self._columns = float_columns(megabytes)
        answer = self._echo()
        checked(bool((answer["column_1"] == self._columns["column_1"]).all()), True, "echo")

    def _echo(self) -> Columns:
        return self.echo_of("echo", self._columns)

    def round(self) -> dict[str, float]:
        return {"echo": seconds_once(self._echo)}


class MeshToAll(Mesh):
    def prepare(self, workers: int) -> None:
        self.make(workers)
        self._columns = float_columns(64)

    def round(self) -> dict[str, float]:
        return {"call": seconds_once(lambda: self._actors.weigh.call(self._columns).get())}


class MeshStart(Mesh):
    def prepare(self, workers: int) -> None:
        self._workers = workers

    def round(self) -> dict[str, float]:
        seconds = seconds_once(lambda: self.make(self._workers))
        self.close()
        return {"ready": seconds}
