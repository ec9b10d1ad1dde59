"""Worker groups on Ray, by verl's constructor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, get_args
from uuid import uuid4

from kapell.workergroup import (
    CALL_SECONDS,
    ClassWithInitArgs,
    PendingCall,
    WorkerGroup,
    WorkerLostError,
    colocated_roles,
)

from .attaching import class_of, names_with_prefix, running_workers
from .classes import RayClassWithInitArgs
from .host import HostFacts
from .pending import pending_call
from .pools import RayResourcePool
from .profiling import profiled
from .starting import START_SECONDS, Beside, GroupStart, Starter
from .workers import RayWorkers

__all__ = ["RayWorkerGroup"]

Arrivals = Literal["private", "read-only"]
"""How arrays and tensors arrive at the workers."""


class RayWorkerGroup(WorkerGroup):
    """One Ray actor per process of ``resource_pool``, driven as one.

    The constructor is verl's. ``options`` are Ray options of the actors (``max_concurrency``, ``runtime_env``, ...);
    ``worker_names`` or ``worker_handles`` attach to running workers instead of starting some. ``timeout`` bounds every
    call that sets none itself, ``start_timeout`` (in verl ``ray_wait_register_center_timeout``, which wins when given)
    the constructors, or the wait for running workers that are busy. A group made with ``sharing_with`` another has its
    workers beside that one's, on the same nodes and devices, without resources of its own.

    With ``arrivals="read-only"``, arrays and tensors reach the workers as views of Ray's object store, without a copy;
    writing to one raises. What comes back to this program is private and writable in any case.
    """

    pending_call_class: ClassVar[Callable[..., PendingCall[Any]]] = staticmethod(pending_call)

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_wait_register_center_timeout: float | None = None,
        *,
        namespace: str | None = None,
        sharing_with: RayWorkerGroup | None = None,
        role: str = "",
        worker_env: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        use_gpu: bool | None = None,
        device_name: str = "cuda",
        master_addr: str | None = None,
        master_port: int | str | None = None,
        master_port_range: Sequence[int] | None = None,
        profile_steps: Sequence[int] | None = None,
        worker_nsight_options: Mapping[str, Any] | None = None,
        arrivals: Arrivals = "private",
        timeout: float = CALL_SECONDS,
        start_timeout: float = START_SECONDS,
    ) -> None:
        if arrivals not in get_args(Arrivals):
            raise ValueError(f"arrivals={arrivals!r} is neither {' nor '.join(map(repr, get_args(Arrivals)))}")
        read_only = arrivals == "read-only"
        if ray_wait_register_center_timeout is not None:
            start_timeout = ray_wait_register_center_timeout
        if worker_names is not None or worker_handles is not None:
            given = ray_cls_with_init, worker_names, worker_handles, namespace, role, read_only
            self._attach(*given, timeout=timeout, start_timeout=start_timeout)
            return
        if sharing_with is not None:
            resource_pool = sharing_with.resource_pool
        if resource_pool is None or ray_cls_with_init is None:
            raise ValueError(
                "a group needs resource_pool and ray_cls_with_init, or worker_names or worker_handles to attach to"
            )
        if use_gpu and not resource_pool.use_gpu:
            raise ValueError("use_gpu=True needs a pool with accelerators; make the pool with use_gpu=True")
        role = role or name_prefix or ray_cls_with_init.worker_class.__name__
        profiling = profiled(worker_nsight_options, profile_steps, device_name)
        declared = ray_cls_with_init.options if isinstance(ray_cls_with_init, RayClassWithInitArgs) else {}
        starter = Starter(
            GroupStart(
                pool=resource_pool,
                cls_with_init=ray_cls_with_init,
                role=role,
                name_prefix=name_prefix if name_prefix is not None else f"{uuid4().hex[:6]}_",
                worker_env=dict(worker_env or {}),
                options=_joined(declared, profiling, options or {}),
                use_gpu=resource_pool.use_gpu if use_gpu is None else use_gpu,
                device_name=device_name,
                strategy="STRICT_PACK" if bin_pack else "PACK",
                detached=detached,
                master=_given_master(master_addr, master_port),
                master_ports=None if master_port_range is None else range(master_port_range[0], master_port_range[-1]),
                read_only=read_only,
                timeout=start_timeout,
                beside=() if sharing_with is None else sharing_with._places_beside(min(start_timeout, CALL_SECONDS)),
            )
        )
        actors = starter.start_all()
        workers = RayWorkers(
            actors,
            role=role,
            facts=starter.facts,
            names=starter.names,
            envs=starter.envs,
            pool=resource_pool,
            read_only=read_only,
            detached=detached,
            restart=starter.start_one,
            on_close=starter.leave,
        )
        self._become(workers, ray_cls_with_init, role, timeout)

    def _attach(
        self,
        cls_with_init: ClassWithInitArgs | None,
        names: Sequence[str] | None,
        handles: Sequence[Any] | None,
        namespace: str | None,
        role: str,
        read_only: bool,
        *,
        timeout: float,
        start_timeout: float,
    ) -> None:
        waiting: Any = {"role": role or "attached group", "timeout": start_timeout}
        found = running_workers(names, handles, namespace, **waiting)
        if cls_with_init is None:
            cls_with_init = class_of(found[0], **waiting)
        role = role or cls_with_init.worker_class.__name__
        workers = RayWorkers(
            [worker.actor for worker in found],
            role=role,
            facts=[worker.facts for worker in found],
            names=[worker.name for worker in found if worker.name],
            owned=False,
            read_only=read_only,
        )
        self._become(workers, cls_with_init, role, timeout)

    def _become(self, workers: RayWorkers, cls_with_init: ClassWithInitArgs, role: str, timeout: float) -> None:
        roles = colocated_roles(cls_with_init)
        super().__init__(workers, cls_with_init.worker_class, role=role, roles=roles, timeout=timeout)

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        *,
        namespace: str | None = None,
        role: str = "",
        arrivals: Arrivals = "private",
        timeout: float = CALL_SECONDS,
        start_timeout: float = START_SECONDS,
    ) -> Self:
        """Attach to running workers by their handles, by their names, or by the ``name_prefix`` of a group.

        The workers know their class; closing this group leaves them running. ``namespace`` is Ray's, by default this
        program's own. Workers that are busy are waited for, up to ``start_timeout`` seconds: then `BusyWorkersError`.
        """
        if worker_names is None and worker_handles is None:
            worker_names = names_with_prefix(name_prefix or "", namespace)
        return cls(
            ray_cls_with_init=ray_cls_with_init,
            name_prefix=name_prefix,
            worker_names=worker_names,
            worker_handles=worker_handles,
            namespace=namespace,
            role=role,
            arrivals=arrivals,
            timeout=timeout,
            start_timeout=start_timeout,
        )

    @property
    def workers(self) -> list[Any]:
        """The actor handles by rank."""
        return list(self._ray_workers.actors)

    @property
    def processes(self) -> list[HostFacts]:
        """Where each rank's process is: node, address, process id, devices."""
        return self._ray_workers.facts

    @property
    def worker_names(self) -> list[str]:
        """The actors' names by rank."""
        return list(self._ray_workers.names)

    @property
    def resource_pool(self) -> RayResourcePool | None:
        """Where the workers were started; None for an attached group."""
        return self._ray_workers.pool

    @property
    def master_address(self) -> str:
        """Where the ranks meet."""
        return self._rendezvous("MASTER_ADDR")

    @property
    def master_port(self) -> str:
        """The port at `master_address`."""
        return self._rendezvous("MASTER_PORT")

    @property
    def _ray_workers(self) -> RayWorkers:
        assert isinstance(self._workers, RayWorkers)
        return self._workers

    def _rendezvous(self, name: str) -> str:
        env = self._ray_workers.environment(0)
        if name not in env:
            raise AttributeError(f"an attached group does not know {name}; ask a worker: get_master_addr_port")
        return env[name]

    def _places_beside(self, timeout: float) -> list[Beside]:
        workers = self._ray_workers
        try:
            visible = workers.visible_devices(timeout)
        except WorkerLostError as error:
            error.add_note(
                f"a group beside another takes the places of its running workers; restart those of {self.role!r}"
            )
            raise
        return [Beside(fact.node_id, devices) for fact, devices in zip(workers.facts, visible, strict=True)]


def _given_master(address: str | None, port: int | str | None) -> tuple[str, int] | None:
    if address is None and port is None:
        return None
    if address is None or port is None:
        raise ValueError(
            f"master_addr={address!r} and master_port={port!r}: give both, or neither to have rank 0 choose them"
        )
    return address, int(port)


def _joined(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Ray options, later ones first; ``runtime_env`` is joined key by key."""
    joined: dict[str, Any] = {}
    for layer in layers:
        runtime_env = {**joined.get("runtime_env", {}), **(layer.get("runtime_env") or {})}
        joined |= layer
        if runtime_env:
            joined["runtime_env"] = runtime_env
    return joined
