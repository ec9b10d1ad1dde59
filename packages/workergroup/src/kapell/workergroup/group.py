"""The group: each labelled method of the worker class as one method over all workers."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from kapell.decorators import Dispatch, DispatchPlan, Execute, GroupShape, MeshLayout, MethodSpec, make_plan, spec_of

from .calls import GroupMethod, PendingCall
from .errors import GroupClosedError, NotRegisteredError, RankContext
from .pool import ClassWithInitArgs
from .workers import RankCall, Workers

__all__ = ["WorkerGroup"]

WorkerT = TypeVar("WorkerT")

_ALL = MethodSpec(dispatch_mode=Dispatch.ONE_TO_ALL)
_RANK_ZERO = MethodSpec(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)


class _Meshes(Mapping[str, MeshLayout]):
    """The meshes of a group by name; asks the workers when a mesh is first needed."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def __getitem__(self, name: str) -> MeshLayout:
        return self._group.mesh(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._group._dispatch_info)

    def __len__(self) -> int:
        return len(self._group._dispatch_info)


class _Lifetime:
    """Shared by a group and its views: whether the workers still run. Views keep it, and so the workers, alive."""

    def __init__(self, workers: Workers[Any]) -> None:
        self.workers = workers
        self.closed = False


class WorkerGroup:
    """Workers of one class, driven as one: ``group.method(batch)`` dispatches, runs on every rank and collects.

    A backend's group makes its `Workers` and hands them over here.
    """

    def __init__(
        self,
        workers: Workers[Any],
        worker_class: type,
        *,
        role: str = "",
        roles: Mapping[str, ClassWithInitArgs] | None = None,
    ) -> None:
        self._start(
            _Lifetime(workers), worker_class, role or worker_class.__name__, roles or {}, range(workers.world_size)
        )

    def _start(
        self,
        lifetime: _Lifetime,
        worker_class: type,
        role: str,
        roles: Mapping[str, ClassWithInitArgs],
        ranks: Sequence[int],
        target: str = "",
    ) -> None:
        self._lifetime = lifetime
        self._workers = lifetime.workers
        self._worker_class = worker_class
        self._role = role
        self._roles = roles
        self._ranks = ranks
        self._target = target
        self._dispatch_info: dict[str, list[int]] = {}
        self._collect_info: dict[str, list[bool]] = {}
        self._shape = GroupShape(world_size=len(ranks), role=role, meshes=_Meshes(self))
        self._methods: dict[str, GroupMethod] = {}
        for name, (spec, function) in _labelled_methods(worker_class).items():
            if hasattr(WorkerGroup, name):
                raise ValueError(
                    f"{worker_class.__name__}.{name} is @register-ed, but {name!r} is the group's own; rename the method"
                )
            self._methods[name] = GroupMethod(self, name, spec, function)
        self.__dict__.update(self._methods)

    @property
    def world_size(self) -> int:
        """The number of workers that a call of this group (or view) reaches."""
        return len(self._ranks)

    @property
    def role(self) -> str:
        """The name of the group in plans, errors and statistics."""
        return self._role

    @property
    def worker_class(self) -> type:
        """The class of the workers."""
        return self._worker_class

    @property
    def registered_methods(self) -> tuple[str, ...]:
        """Names of the methods that the group offers."""
        return tuple(self._methods)

    def as_(self, worker_class: type[WorkerT]) -> WorkerT:
        """This group, seen by type checkers as a worker: completion and checked signatures.

        Raises ``TypeError`` when the workers are not of that class.
        """
        if not issubclass(self._worker_class, worker_class):
            raise TypeError(
                f"group {self.role!r} has workers of {self._worker_class.__name__}, not {worker_class.__name__}"
            )
        return cast("WorkerT", self)

    def __getattr__(self, name: str) -> Any:
        worker_class = self.__dict__.get("_worker_class")
        if worker_class is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        raise NotRegisteredError(name, worker_class.__name__, hasattr(worker_class, name), self.registered_methods)

    # Calls

    def plan_call(
        self,
        name: str,
        spec: MethodSpec,
        function: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> DispatchPlan:
        """Plan a call of the worker method ``name``; checks the arguments and sends nothing."""
        signature = None if function is None else inspect.signature(function)
        return make_plan(name, spec, self._shape, args, kwargs, signature=signature, group=self)

    def start_call(self, plan: DispatchPlan) -> PendingCall[Any]:
        """Send a planned call to the workers. Raises `GroupClosedError` after `close`."""
        if self._lifetime.closed:
            raise GroupClosedError(self.role)
        workers = self._workers
        shipped = []
        for argument in plan.arguments:
            num_readers = Counter(argument.index)
            shipped.append((argument, [workers.put(v, num_readers[i]) for i, v in enumerate(argument.values)]))
        wanted = set(plan.collect_ranks)
        handles = {}
        for position, rank in enumerate(plan.ranks):
            args = []
            kwargs = {}
            for argument, values in shipped:
                value = values[argument.index[position]]
                if argument.name is None:
                    args.append(value)
                else:
                    kwargs[argument.name] = value
            call = RankCall(self._ranks[rank], plan.method, tuple(args), kwargs, self._target, rank in wanted)
            handles[rank] = workers.submit(call)
        return self._pending(plan, handles)

    def _pending(self, plan: DispatchPlan, handles: Mapping[int, Any]) -> PendingCall[Any]:
        """The future of a call; a backend may return its own kind."""
        return PendingCall(
            self._workers,
            plan,
            handles,
            role=self.role,
            context=lambda rank: self._context(plan, rank),
            collect=plan.collect,
        )

    def _context(self, plan: DispatchPlan, rank: int) -> RankContext:
        mesh = {name: dp_ranks[rank] for name, dp_ranks in self._dispatch_info.items()}
        position = plan.ranks.index(rank)
        rows = plan.rows[position] if plan.rows else None
        return RankContext(self.role, rank, plan.method, mesh, rows)

    def _execute(self, name: str, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingCall[Any]:
        return self.start_call(self.plan_call(name, spec, getattr(self._worker_class, name, None), args, kwargs))

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> PendingCall[Any]:
        """Same as `execute_all_async`."""
        return self.execute_all_async(method_name, *args, **kwargs)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> PendingCall[Any]:
        """Start any method of the worker, labelled or not, on every rank with the same arguments."""
        return self._execute(method_name, _ALL, args, kwargs)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Run any method of the worker on every rank with the same arguments; the results by rank."""
        return self.execute_all_async(method_name, *args, **kwargs).get()

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> PendingCall[Any]:
        """Same as `execute_rank_zero_async`."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> PendingCall[Any]:
        """Start any method of the worker on rank 0."""
        return self._execute(method_name, _RANK_ZERO, args, kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Run any method of the worker on rank 0."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs).get()

    # Meshes

    def mesh(self, name: str) -> MeshLayout:
        """The data-parallel rank of each worker in a mesh, and whose result is collected; asked once."""
        if name not in self._dispatch_info:
            dp_ranks = self.execute_all_sync("_query_dispatch_info", name)
            collect = self.execute_all_sync("_query_collect_info", name)
            self._dispatch_info[name], self._collect_info[name] = dp_ranks, collect
        return MeshLayout(tuple(self._dispatch_info[name]), tuple(self._collect_info[name]))

    # Views

    def __len__(self) -> int:
        return self.world_size

    def __getitem__(self, index: int | slice | Sequence[int]) -> WorkerGroup:
        """Some of the workers as a group of their own: ``group[0:2]``, ``group[3]``, ``group[[0, 2]]``."""
        if isinstance(index, int):
            ranks = [range(self.world_size)[index]]
        elif isinstance(index, slice):
            ranks = list(range(self.world_size)[index])
        else:
            ranks = [range(self.world_size)[rank] for rank in index]
        if not ranks:
            raise IndexError(f"{index!r} selects none of the {self.world_size} workers of {self.role!r}")
        return self._view(self._worker_class, self.role, self._target, [self._ranks[rank] for rank in ranks])

    def where(self, **dp_ranks: int) -> WorkerGroup:
        """The workers with the given data-parallel rank in each named mesh: ``group.where(actor=0)``."""
        layouts = {name: self.mesh(name) for name in dp_ranks}
        ranks = [
            rank
            for rank in range(self.world_size)
            if all(layouts[name].dp_ranks[rank] == dp_rank for name, dp_rank in dp_ranks.items())
        ]
        if not ranks:
            known = {name: sorted(set(layout.dp_ranks)) for name, layout in layouts.items()}
            raise IndexError(f"no worker of {self.role!r} is at {dp_ranks}; data-parallel ranks by mesh: {known}")
        return self[ranks]

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        """One group per role of colocated workers, over the same processes."""
        return {name: self._role_view(name) for name in prefix_set}

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make each role of colocated workers an attribute of this group."""
        for name in prefix_set:
            setattr(self, name, self._role_view(name))

    def _role_view(self, name: str) -> WorkerGroup:
        if name not in self._roles:
            raise KeyError(f"group {self.role!r} holds no role {name!r}; roles: {sorted(self._roles)}")
        return self._view(self._roles[name].worker_class, name, name, self._ranks)

    def _view(self, worker_class: type, role: str, target: str, ranks: Sequence[int]) -> WorkerGroup:
        view = object.__new__(type(self))
        view._start(self._lifetime, worker_class, role, {} if target else self._roles, ranks, target)
        return view

    # Lifecycle

    @property
    def closed(self) -> bool:
        """Whether the workers have been shut down."""
        return self._lifetime.closed

    def close(self) -> None:
        """End all workers. Harmless when repeated; views of the group are closed with it."""
        if not self._lifetime.closed:
            self._lifetime.closed = True
            self._workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def is_alive(self) -> list[bool]:
        """For each rank, whether its worker answers."""
        return [not self.closed and self._workers.is_alive(rank) for rank in self._ranks]

    def restart(self, rank: int) -> None:
        """Build one worker anew with its constructor arguments; its meshes are asked again."""
        self._workers.restart(self._ranks[rank])
        self._dispatch_info.clear()
        self._collect_info.clear()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.world_size} workers of {self._worker_class.__name__}"
        return f"<{type(self).__name__} {self.role!r}: {state}>"


def _labelled_methods(worker_class: type) -> dict[str, tuple[MethodSpec, Callable[..., Any]]]:
    """The methods of a class that carry a label, after inheritance: an override without one is not exposed."""
    found = {}
    for name in dir(worker_class):
        function = inspect.getattr_static(worker_class, name)
        spec = spec_of(function)
        if spec is not None:
            found[name] = (spec, getattr(worker_class, name))
    return found
