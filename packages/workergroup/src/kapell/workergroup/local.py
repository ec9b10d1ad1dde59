"""The in-process backend: N workers in this process, one after the other or on threads.

Serial is deterministic and runs each call in the caller's own stack: a breakpoint in a worker method just works.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

from .backend import Backend
from .colocation import colocated_roles
from .environment import placement_env, use_worker_env
from .errors import RemoteError
from .group import WorkerGroup
from .isolation import isolate
from .pool import ClassWithInitArgs, ResourcePool
from .workers import RankCall, Workers, invoke

__all__ = ["LocalBackend", "LocalWorkerGroup"]

Mode = Literal["serial", "threads"]


class LocalWorkers(Workers["Future[Any]"]):
    """The workers of one local group; a handle is a future that, in serial mode, is already done."""

    def __init__(self, cls_with_init: ClassWithInitArgs, envs: Sequence[Mapping[str, str]], mode: Mode) -> None:
        if mode not in ("serial", "threads"):
            raise ValueError(f"mode {mode!r} is not known; use 'serial' or 'threads'")
        self._cls_with_init = cls_with_init
        self._envs = envs
        self._mode = mode
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"rank-{rank}") if mode == "threads" else None
            for rank in range(len(envs))
        ]
        # One event loop a worker, kept over its calls: locks and queues of async methods live as long as the worker.
        self._loops = [asyncio.Runner() for _ in envs]
        self._workers: list[Any] = [None] * len(envs)
        try:
            building = [self._run(rank, self._build) for rank in range(len(envs))]
            self._workers = [future.result() for future in building]
        except BaseException:
            self.close()
            raise

    @property
    def world_size(self) -> int:
        return len(self._envs)

    def put(self, value: Any, num_readers: int) -> Any:
        return value

    def submit(self, call: RankCall) -> Future[Any]:
        # Copied here, before the call returns: what the caller writes afterwards must not reach the worker.
        args = [isolate(value) for value in call.args]
        kwargs = {name: isolate(value) for name, value in call.kwargs.items()}
        return self._run(call.rank, lambda: self._answer(call, args, kwargs))

    def wait(self, handles: Sequence[Future[Any]], timeout: float | None) -> list[Future[Any]]:
        done = [handle for handle in handles if handle.done()]
        if done or (timeout is not None and timeout <= 0):
            return done
        return list(wait(handles, timeout, FIRST_COMPLETED).done)

    def fetch(self, handle: Future[Any]) -> Any:
        try:
            return handle.result()
        except Exception:
            raise
        except BaseException as error:
            # SystemExit and its like end a remote worker's call, never the controller.
            raise RemoteError(type(error).__name__, str(error), "") from error

    def is_alive(self, rank: int) -> bool:
        return self._workers[rank] is not None

    def restart(self, rank: int) -> None:
        self._workers[rank] = self._run(rank, self._build).result()

    def close(self) -> None:
        self._workers = [None] * len(self._envs)
        for thread in self._threads:
            if thread is not None:
                thread.shutdown(wait=False, cancel_futures=True)
        for loop in self._loops:
            loop.close()

    def _build(self) -> Any:
        plain = self._cls_with_init
        return plain.worker_class(*isolate(plain.args), **isolate(plain.kwargs))

    def _answer(self, call: RankCall, args: list[Any], kwargs: dict[str, Any]) -> Any:
        result = invoke(self._workers[call.rank], call.target, call.method, args, kwargs)
        if inspect.iscoroutine(result):
            result = self._finish(call.rank, result)
        return isolate(result) if call.wanted else None

    def _finish(self, rank: int, coroutine: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loops[rank].run(coroutine)
        # The caller itself runs in an event loop: no second one can run in its thread.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._loops[rank].run, coroutine).result()

    def _run(self, rank: int, function: Callable[[], Any]) -> Future[Any]:
        thread = self._threads[rank]
        if thread is not None:
            return thread.submit(self._in_worker, rank, function)
        future: Future[Any] = Future()
        try:
            with _environ(self._envs[rank]):
                future.set_result(self._in_worker(rank, function))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            future.set_exception(error)
        return future

    def _in_worker(self, rank: int, function: Callable[[], Any]) -> Any:
        with use_worker_env(self._envs[rank]):
            return function()


@contextmanager
def _environ(env: Mapping[str, str]) -> Generator[None]:
    """Show ``env`` in ``os.environ`` while a serial worker runs, for code that reads it there; put back what was."""
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class LocalWorkerGroup(WorkerGroup):
    """Workers in this process.

    ``pool`` is a `ResourcePool` or the number of workers. With ``mode="threads"`` each worker has its own thread, where
    ``os.environ`` is everyone's: read a worker's own environment with `current_worker_env`.
    """

    def __init__(
        self,
        pool: ResourcePool | int,
        cls_with_init: ClassWithInitArgs,
        *,
        role: str = "",
        worker_env: Mapping[str, str] | None = None,
        mode: Mode = "serial",
    ) -> None:
        if isinstance(pool, int):
            pool = ResourcePool([pool])
        port = _free_port()
        places = zip(pool.local_rank_list, pool.local_world_size_list, pool.node_rank_list, strict=True)
        envs = [
            placement_env(
                rank=rank,
                world_size=pool.world_size,
                local_rank=local_rank,
                local_world_size=local_world_size,
                node_rank=node_rank,
                master_addr="127.0.0.1",
                master_port=port,
                extra=worker_env,
            )
            for rank, (local_rank, local_world_size, node_rank) in enumerate(places)
        ]
        workers = LocalWorkers(cls_with_init, envs, mode)
        super().__init__(workers, cls_with_init.worker_class, role=role, roles=colocated_roles(cls_with_init))


class LocalBackend(Backend):
    """In process: for debugging, for tests in milliseconds, and for machines without Ray."""

    name: ClassVar[str] = "local"

    def __init__(self, mode: Mode = "serial") -> None:
        self._mode: Mode = mode
        self._groups: list[WorkerGroup] = []

    def resource_pool(self, process_on_nodes: Sequence[int], **options: Any) -> ResourcePool:
        """A pool that reserves nothing; ``options`` are those of `ResourcePool`."""
        return ResourcePool(process_on_nodes, **options)

    def worker_group(
        self,
        pool: ResourcePool,
        cls_with_init: ClassWithInitArgs,
        *,
        role: str = "",
        worker_env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> WorkerGroup:
        """Build the workers here; ``mode`` may differ from the backend's."""
        options.setdefault("mode", self._mode)
        group = LocalWorkerGroup(pool, cls_with_init, role=role, worker_env=worker_env, **options)
        self._groups.append(group)
        return group

    def close(self) -> None:
        """Close every group made here."""
        for group in self._groups:
            group.close()
        self._groups.clear()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
