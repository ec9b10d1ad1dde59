"""Parts of a group as groups of their own: slices, ranks by mesh coordinates, a free worker, colocated roles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from .pool import ClassWithInitArgs
from .routing import Route

if TYPE_CHECKING:
    from .calls import PendingCall

__all__ = ["GroupViews"]


class GroupViews(ABC):
    """The part of `WorkerGroup` that makes views. A view shares the workers and keeps them alive."""

    _route: Route
    _worker_class: type
    _roles: Mapping[str, ClassWithInitArgs]

    @abstractmethod
    def _start(self, route: Route, worker_class: type, roles: Mapping[str, ClassWithInitArgs]) -> None:
        """Become the group over a route."""

    @abstractmethod
    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> PendingCall[Any]:
        """Start a method on every rank."""

    @property
    def world_size(self) -> int:
        """The number of workers that a call of this group (or view) reaches."""
        return len(self._route.ranks)

    @property
    def concurrent(self) -> bool:
        """Whether the ranks of a call run side by side, so that they may wait for each other in it."""
        return self._route.runtime.workers.concurrent or self.world_size == 1

    @property
    def role(self) -> str:
        """The name of the group in plans, errors and statistics."""
        return self._route.role

    def __len__(self) -> int:
        return self.world_size

    def __getitem__(self, index: int | slice | Sequence[int]) -> Self:
        """Some of the workers as a group of their own: ``group[0:2]``, ``group[3]``, ``group[[0, 2]]``."""
        everyone = range(self.world_size)
        if isinstance(index, int):
            ranks = [everyone[index]]
        elif isinstance(index, slice):
            ranks = list(everyone[index])
        else:
            ranks = [everyone[rank] for rank in index]
        if not ranks:
            raise IndexError(f"{index!r} selects none of the {self.world_size} workers of {self.role!r}")
        if len(set(ranks)) < len(ranks):
            raise IndexError(f"{index!r} selects a worker of {self.role!r} twice")
        return self._view([self._route.ranks[rank] for rank in ranks])

    def where(self, mesh: str = "", /, **coordinates: int) -> Self:
        """The workers at the given coordinates of a mesh: ``group.where(dp=0)``, ``group.where("train", dp=0, tp=1)``.

        Without its name, the mesh is the only one that the workers registered.
        """
        places: list[Mapping[str, Mapping[str, int]]] = self.execute_all_async("query_mesh_places").get()
        names = sorted(set().union(*places))
        if not mesh:
            if len(names) != 1:
                raise ValueError(f"say which mesh of {self.role!r}, such as where('actor', dp=0); known: {names}")
            mesh = names[0]
        found = [rank for rank, place in enumerate(places) if coordinates.items() <= dict(place.get(mesh, {})).items()]
        if not found or not coordinates:
            known = {rank: dict(place.get(mesh, {})) for rank, place in enumerate(places)}
            raise IndexError(f"no worker of {self.role!r} is at {coordinates} in mesh {mesh!r}; ranks are at: {known}")
        return self[found]

    def choose(self) -> Self:
        """One free worker as a group of one; when all are busy, one with the fewest calls to answer.

        A call counts as long as somebody holds its `PendingCall`. Free workers take turns.
        """
        runtime = self._route.runtime
        load = Counter(rank for call in runtime.calls() for rank in call.busy_ranks())
        turn = runtime.chosen + 1
        size = self.world_size
        ranks = self._route.ranks
        best = min(range(size), key=lambda rank: (load[ranks[rank]], (rank - turn) % size))
        runtime.chosen = best
        return self[best]

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, Self]:
        """One group per role of colocated workers, over the same processes."""
        return {name: self._role_view(name) for name in prefix_set}

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make each role of colocated workers an attribute of this group."""
        for name in prefix_set:
            setattr(self, name, self._role_view(name))

    def by_reference(self) -> Self:
        """The same workers, with whom the batches stay that they return.

        A call that would give a `DataProto` gives a ``StoredBatch``, which refers to its columns; given to another
        call, the worker that reads a column fetches its rows of it from where they were made.
        """
        return self._make(replace(self._route, by_reference=True), self._worker_class, self._roles)

    def _role_view(self, name: str) -> Self:
        if name not in self._roles:
            raise KeyError(f"group {self.role!r} holds no role {name!r}; roles: {sorted(self._roles)}")
        route = self._route
        return self._make(replace(route, role=name, target=name), self._roles[name].worker_class, {})

    def _view(self, ranks: Sequence[int]) -> Self:
        route = self._route
        return self._make(replace(route, ranks=ranks), self._worker_class, self._roles)

    def _make(self, route: Route, worker_class: type, roles: Mapping[str, ClassWithInitArgs]) -> Self:
        view = object.__new__(type(self))
        view._start(route, worker_class, roles)
        return view
