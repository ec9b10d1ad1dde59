"""The in-process backend: N workers in this process, one after the other or on threads."""

from __future__ import annotations

import socket
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from .backend import Backend
from .colocation import colocated_roles
from .environment import placement_env, show_worker_env
from .group import CALL_SECONDS, WorkerGroup
from .pool import ClassWithInitArgs, ResourcePool
from .routing import Runtime
from .serial import LocalWorkers, SerialWorkers
from .threads import ThreadWorkers

__all__ = ["LocalBackend", "LocalWorkerGroup"]

Mode = Literal["serial", "threads"]
_WORKERS: dict[str, type[LocalWorkers]] = {"serial": SerialWorkers, "threads": ThreadWorkers}


class LocalWorkerGroup(WorkerGroup):
    """Workers in this process.

    ``mode="serial"`` runs a call rank by rank in the caller's own stack: deterministic, a breakpoint in a worker method
    just works, exceptions keep their traceback, and a call is over before the group's method returns, whatever its
    timeout. ``mode="threads"`` gives each worker a thread. In both, arguments and results are private copies, as if
    they had travelled; each worker sees its own variables in ``os.environ``.
    """

    def __init__(
        self,
        pool: ResourcePool,
        cls_with_init: ClassWithInitArgs,
        *,
        role: str = "",
        worker_env: Mapping[str, str] | None = None,
        mode: Mode = "serial",
        timeout: float = CALL_SECONDS,
    ) -> None:
        if mode not in _WORKERS:
            raise ValueError(f"mode {mode!r} is not known; use 'serial' or 'threads'")
        role = role or cls_with_init.worker_class.__name__
        show_worker_env()
        port = _free_port()
        local_ranks, local_world_sizes = pool.local_rank_list(), pool.local_world_size_list()
        envs = [
            placement_env(
                rank=rank,
                world_size=pool.world_size,
                local_rank=local_ranks[rank],
                local_world_size=local_world_sizes[rank],
                node_rank=pool.node_rank_list[rank],
                master_addr="127.0.0.1",
                master_port=port,
                extra=worker_env,
            )
            for rank in range(pool.world_size)
        ]
        workers = _WORKERS[mode](role, cls_with_init, envs)
        roles = colocated_roles(cls_with_init)
        super().__init__(workers, cls_with_init.worker_class, role=role, roles=roles, timeout=timeout)
        # When the last view is gone, so is the use of the threads.
        weakref.finalize(self._route.runtime, workers.close)

    def lose(self, rank: int) -> None:
        """Act as if the process of one worker had died, to test what a program does then; ``restart`` revives it."""
        assert isinstance(self._workers, LocalWorkers)
        self._workers.lose(self._route.ranks[rank])


class LocalBackend(Backend):
    """In process: for debugging, for tests in milliseconds, and for machines without Ray."""

    name: ClassVar[str] = "local"

    def __init__(self, mode: Mode = "serial") -> None:
        self._mode: Mode = mode
        self.concurrent = mode != "serial"
        self._runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()

    def resource_pool(self, process_on_nodes: Sequence[int], *, use_gpu: bool = False, **options: Any) -> ResourcePool:
        """A pool that reserves nothing: with ``use_gpu``, workers share the devices that this process sees.

        ``options`` are those of `ResourcePool`.
        """
        del use_gpu
        return ResourcePool(process_on_nodes, **options)

    def worker_group(
        self,
        pool: ResourcePool,
        cls_with_init: ClassWithInitArgs,
        *,
        role: str = "",
        worker_env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> LocalWorkerGroup:
        """Build the workers here; ``mode`` may differ from the backend's."""
        options.setdefault("mode", self._mode)
        group = LocalWorkerGroup(pool, cls_with_init, role=role, worker_env=worker_env, **options)
        self._runtimes.add(group._route.runtime)
        return group

    def close(self) -> None:
        """Close every group made here."""
        for runtime in list(self._runtimes):
            runtime.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
