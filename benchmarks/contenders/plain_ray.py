"""The same by hand: Ray actors and numpy arrays, as someone who knows Ray writes it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..timing import seconds_once, seconds_per_call
from .batches import checked, float_columns, small_arrays
from .memory import peaks
from .ray_session import restart_ray, start_ray

Columns = dict[str, np.ndarray]


@ray.remote(num_cpus=0)
class PlainWorker:
    def ping(self) -> int:
        return 1

    def pid(self) -> int:
        return os.getpid()

    def rows(self, ids: Any) -> Any:
        return ids

    def echo_views(self, columns: Columns) -> Columns:
        return columns

    def echo_private(self, columns: Columns) -> Columns:
        own = {name: np.array(array) for name, array in columns.items()}
        own["column_0"][0, 0] += 1
        return own

    def take(self, columns: Columns) -> int:
        own = {name: np.array(array) for name, array in columns.items()}
        return len(own["column_0"])


@ray.remote(num_cpus=0)
class TorchWorker:
    def __init__(self) -> None:
        import tensordict
        import torch

        self._used = (tensordict, torch)

    def ping(self) -> int:
        return 1


class PlainActors:
    """Actors that are made anew when their number changes."""

    def __init__(self) -> None:
        start_ray()
        self._actors: list[Any] = []

    def make(self, workers: int) -> list[Any]:
        if len(self._actors) != workers:
            self.close()
            self._actors = [PlainWorker.remote() for _ in range(workers)]
            ray.get([actor.ping.remote() for actor in self._actors])
        return self._actors

    def echo_of(self, method: str, columns: Columns) -> Columns:
        parts = {name: np.array_split(array, len(self._actors)) for name, array in columns.items()}
        answers = ray.get(
            [
                getattr(actor, method).remote({name: parts[name][rank] for name in parts})
                for rank, actor in enumerate(self._actors)
            ]
        )
        return {name: np.concatenate([answer[name] for answer in answers]) for name in parts}

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []


class PlainTiny(PlainActors):
    def prepare(self, workers: int) -> None:
        self.make(workers)
        self._ids = np.arange(workers * 2)
        checked(self._rows().tolist(), self._ids.tolist(), "rows")
        self._columns = small_arrays(workers * 2)
        checked(self._rows_of_columns()["uid"].tolist(), self._columns["uid"].tolist(), "columns")

    def _rows_of_columns(self) -> Columns:
        return self.echo_of("rows", self._columns)

    def _rows(self) -> np.ndarray:
        parts = np.array_split(self._ids, len(self._actors))
        return np.concatenate(
            ray.get([actor.rows.remote(part) for actor, part in zip(self._actors, parts, strict=True)])
        )

    def round(self) -> dict[str, float]:
        def ping() -> list[int]:
            return ray.get([actor.ping.remote() for actor in self._actors])

        return {
            "ping": seconds_per_call(ping, at_least=0.1),
            "rows": seconds_per_call(self._rows, at_least=0.1),
            "rows of six columns": seconds_per_call(self._rows_of_columns, at_least=0.1),
        }


class PlainEcho(PlainActors):
    """``private``: each receiver, the driver included, copies what arrives once. Otherwise workers get views, and the
    driver's copy is the join."""

    def __init__(self, private: bool) -> None:
        super().__init__()
        self._method = "echo_private" if private else "echo_views"

    def prepare(self, megabytes: int) -> None:
        self.make(4)
        self._columns = float_columns(megabytes)
        answer = self._echo()
        checked(bool((answer["column_1"] == self._columns["column_1"]).all()), True, "echo")

    def _echo(self) -> Columns:
        return self.echo_of(self._method, self._columns)

    def round(self) -> dict[str, float]:
        return {"echo": seconds_once(self._echo)}


class PlainMemory(PlainEcho):
    def prepare(self, megabytes: int) -> None:
        self._columns = float_columns(megabytes)

    def _fresh(self) -> list[int]:
        self._actors = []
        restart_ray()
        return ray.get([actor.pid.remote() for actor in self.make(4)])

    def _take(self) -> None:
        parts = {name: np.array_split(array, 4) for name, array in self._columns.items()}
        ray.get(
            [actor.take.remote({name: parts[name][rank] for name in parts}) for rank, actor in enumerate(self._actors)]
        )

    def _to_all(self) -> None:
        reference = ray.put(self._columns)
        ray.get([actor.take.remote(reference) for actor in self._actors])

    def round(self) -> dict[str, float]:
        nbytes = sum(array.nbytes for array in self._columns.values())
        return peaks(self._fresh, nbytes, sending=self._take, to_all=self._to_all, echo=self._echo)


class PlainToAll(PlainActors):
    def prepare(self, workers: int) -> None:
        self.make(workers)
        self._columns = float_columns(64)

    def _call(self) -> list[int]:
        reference = ray.put(self._columns)
        return ray.get([actor.take.remote(reference) for actor in self._actors])

    def round(self) -> dict[str, float]:
        return {"call": seconds_once(self._call)}


class PlainStart:
    """A placement group, actors on it, and one answer of each."""

    def __init__(self) -> None:
        start_ray()

    def prepare(self, workers: int) -> None:
        self._workers = workers

    def round(self) -> dict[str, float]:
        return {"ready": self._start(PlainWorker), "ready, workers import torch": self._start(TorchWorker)}

    def _start(self, actor_class: Any) -> float:
        kept: list[Any] = []

        def start() -> None:
            group = placement_group([{"CPU": 1}] * self._workers, strategy="STRICT_PACK")
            ray.get(group.ready())
            kept.append(group)
            actors = [
                actor_class.options(
                    num_cpus=1,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
                ).remote()
                for bundle in range(self._workers)
            ]
            kept.extend(actors)
            ray.get([actor.ping.remote() for actor in actors])

        seconds = seconds_once(start)
        for actor in kept[1:]:
            ray.kill(actor)
        remove_placement_group(kept[0])
        return seconds
