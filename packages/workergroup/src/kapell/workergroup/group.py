"""The group: each labelled method of the worker class as one method over all workers."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar, cast

from kapell.decorators import (
    CallPlanner,
    Dispatch,
    DispatchPlan,
    Execute,
    GroupShape,
    MeshLayout,
    MethodSpec,
    signature_of,
    spec_of,
)

from .calls import PendingCall
from .errors import NotRegisteredError
from .health import Liveness, RankHealth, rank_health
from .meshes import GroupMeshes, layout_of
from .methods import CallOptions, GroupMethod
from .pool import ClassWithInitArgs
from .recording import record_call
from .routing import Route, Runtime
from .spans import start_call_span
from .stats import GroupStats
from .trace import trace_events
from .views import GroupViews
from .workers import Workers

__all__ = ["WorkerGroup"]

WorkerT = TypeVar("WorkerT")

_ALL = MethodSpec(dispatch_mode=Dispatch.ONE_TO_ALL)
_RANK_ZERO = MethodSpec(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
CALL_SECONDS = 24 * 3600.0
"""No call waits for ever; one that needs more says so by ``options(timeout=...)``."""
_RUN_TIMES_SECONDS = 1.0  # for workers to say when calls ran; one that is busy longer is heard the next time


class WorkerGroup(GroupViews):
    """Workers of one class, driven as one: ``group.method(batch)`` dispatches, runs on every rank and collects.

    A backend's group makes its `Workers` and hands them over here. ``timeout`` bounds every call that sets none itself.
    """

    pending_call_class: ClassVar[Callable[..., PendingCall[Any]]] = PendingCall
    """What a non-blocking call returns; a backend may have its own kind."""

    def __init__(
        self,
        workers: Workers[Any],
        worker_class: type,
        *,
        role: str = "",
        roles: Mapping[str, ClassWithInitArgs] | None = None,
        timeout: float = CALL_SECONDS,
    ) -> None:
        route = Route(Runtime(workers, timeout), role or worker_class.__name__, "", range(workers.world_size))
        self._start(route, worker_class, roles or {})

    def _start(self, route: Route, worker_class: type, roles: Mapping[str, ClassWithInitArgs]) -> None:
        self._route = route
        self._workers = route.runtime.workers
        self._worker_class = worker_class
        self._roles = roles
        self._dispatch_info: dict[str, list[int]] = {}
        self._collect_info: dict[str, list[bool]] = {}
        self._shape = GroupShape(world_size=len(route.ranks), role=route.role, meshes=GroupMeshes(self))
        self._methods: dict[str, GroupMethod] = {}
        for name, (spec, function) in _labelled_methods(worker_class).items():
            if hasattr(type(self), name):
                raise ValueError(
                    f"{worker_class.__name__}.{name} is @register-ed, but {name!r} is the group's own; "
                    "rename the method"
                )
            self._methods[name] = GroupMethod(self, name, spec, function)
        self.__dict__.update(self._methods)

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

    def planner(self, name: str, spec: MethodSpec, signature: inspect.Signature | None) -> CallPlanner:
        """What plans the calls of the worker method ``name``: it checks their arguments and sends nothing."""
        return CallPlanner(name, spec, self._shape, signature=signature, group=self)

    def start_call(self, name: str, plan: DispatchPlan, options: CallOptions, *, began: float) -> PendingCall[Any]:
        """Send a planned call to the workers. Raises `GroupClosedError` after `close`."""
        route = self._route
        span = start_call_span(route.role, name, len(plan.ranks))
        if options.record is not None:
            record_call(options.record, route, self._worker_class, name, plan)
        direct = options.blocking
        handles, record = route.send(name, plan, span, began=began, direct=direct)
        limit = route.runtime.limit if options.timeout is None else options.timeout
        pending = self.pending_call_class(
            route, name, plan, handles, record, limit=limit, retry=options.retry, span=span, direct=direct
        )
        route.runtime.note(pending)
        return pending

    def _execute(self, name: str, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingCall[Any]:
        began = time.time()
        signature = (
            signature_of(self._worker_class, name) if callable(getattr(self._worker_class, name, None)) else None
        )
        plan = self.planner(name, spec, signature)(args, kwargs)
        return self.start_call(name, plan, CallOptions(blocking=False), began=began)

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
        """The data-parallel rank of each worker in a mesh, and whose result is collected; asked once.

        In a slice of the group, data-parallel ranks are counted anew, and each has a rank that is collected.
        Raises ``KeyError`` when not all workers have registered the mesh.
        """
        if name not in self._dispatch_info:
            entries = self.execute_all_sync("query_mesh_entry", name)
            layout = layout_of(name, self.role, entries, whole=self.world_size == self._workers.world_size)
            self._dispatch_info[name], self._collect_info[name] = list(layout.dp_ranks), list(layout.collect)
        return MeshLayout(tuple(self._dispatch_info[name]), tuple(self._collect_info[name]))

    # Accounting

    def stats(self) -> GroupStats:
        """What the last calls cost, in bytes and seconds per rank and method; ``print`` it for a table."""
        self._fetch_run_times()
        ledger = self._route.runtime.ledger
        return GroupStats.of(ledger.records, ledger.num_calls)

    def trace_events(self) -> list[dict[str, Any]]:
        """The last calls as events of a Chrome trace, one row a rank; `save_trace` writes them to a file."""
        self._fetch_run_times()
        return trace_events(self._route.runtime.ledger.records, self.role)

    def _fetch_run_times(self) -> None:
        runtime = self._route.runtime
        if not runtime.closed:
            runtime.ledger.add_run_times(self._workers.run_times(range(self._workers.world_size), _RUN_TIMES_SECONDS))

    # Lifecycle

    @property
    def closed(self) -> bool:
        """Whether the workers have been shut down."""
        return self._route.runtime.closed

    def close(self) -> None:
        """End all workers. Harmless when repeated; views of the group are closed with it."""
        self._route.runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def is_alive(self) -> list[bool]:
        """For each rank, whether its worker's process is there."""
        ranks = self._route.ranks
        return [False] * len(ranks) if self.closed else self._workers.alive(ranks)

    def health(self) -> list[RankHealth]:
        """For each rank, whether it lives and which calls it has not answered yet. Disturbs no worker."""
        return rank_health(self._route)

    def watch(self, on_lost: Callable[[int], None], *, interval: float = 5.0) -> Liveness:
        """Call ``on_lost(rank)`` from a background thread, once for each rank whose process is gone.

        Looks every ``interval`` seconds, until the group or the returned watch is closed. Sends no signals.
        """
        return Liveness(self._route, on_lost, interval)

    def restart(self, rank: int) -> None:
        """Build one worker anew with its constructor arguments; its meshes are asked again.

        Raises `GroupClosedError` after `close`.
        """
        self._route.restart(self._route.ranks[rank])
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
