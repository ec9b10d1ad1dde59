"""The backend ``ray``: pools and groups on a running Ray, or on one started here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from weakref import WeakSet

import ray

from kapell.workergroup import Backend, ClassWithInitArgs, ResourcePool

from .group import RayWorkerGroup
from .pools import RayResourcePool
from .session import ensure_ray, this_session

__all__ = ["RayBackend"]


class RayBackend(Backend):
    """Joins Ray, or starts it on this machine, when first used; ends what it made when closed.

    A Ray started here has room for the first pool and for small ones beside it. Options are those of `ensure_ray`:
    ``address``, ``num_cpus``, ``dashboard``, ``namespace`` and any of ``ray.init``.
    """

    name: ClassVar[str] = "ray"

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._session: tuple[str, str] | None = None  # the one that this backend joined or started
        self._runtimes: WeakSet[Any] = WeakSet()  # of groups: one that nobody holds ends by itself
        self._pools: list[RayResourcePool] = []

    def start(self) -> None:
        """Join or start Ray now rather than at the first pool. Harmless when repeated."""
        self._start(needed_cpus=0)

    def _start(self, *, needed_cpus: float) -> None:
        if ensure_ray(needed_cpus=needed_cpus, **self._options):
            self._session = this_session()

    def resource_pool(
        self, process_on_nodes: Sequence[int], *, use_gpu: bool = False, **options: Any
    ) -> RayResourcePool:
        """A pool on CPUs, or on accelerators with ``use_gpu``; ``options`` are those of `RayResourcePool`."""
        pool = RayResourcePool(process_on_nodes, use_gpu, **options)
        self._start(needed_cpus=pool.world_size * pool.cpus_per_process)
        self._pools.append(pool)
        return pool

    def worker_group(
        self,
        pool: ResourcePool,
        cls_with_init: ClassWithInitArgs,
        *,
        role: str = "",
        worker_env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> RayWorkerGroup:
        """Start the workers; ``options`` are those of `RayWorkerGroup`."""
        if not isinstance(pool, RayResourcePool):
            raise TypeError(
                f"a Ray group needs a RayResourcePool, got {type(pool).__name__}; use this backend's resource_pool"
            )
        group = RayWorkerGroup(pool, cls_with_init, role=role, worker_env=worker_env, **options)
        self._runtimes.add(group._route.runtime)
        return group

    def close(self) -> None:
        """End the groups, give the pools back, and leave Ray if this backend joined or started it."""
        for runtime in list(self._runtimes):
            runtime.close()
        while self._pools:
            self._pools.pop().close()
        if self._session and self._session == this_session():
            ray.shutdown()
        self._session = None
