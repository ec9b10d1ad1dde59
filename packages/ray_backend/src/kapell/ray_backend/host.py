"""The Ray actor around one worker: sets its environment, builds it, runs its methods. Imports as little as it can."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from kapell.workergroup import ClassWithInitArgs, invoke

from .failures import RemoteFailure
from .rendezvous import PortClaim, claim_port
from .shipping import shipped, unpack

__all__ = ["AsyncWorkerHost", "HostFacts", "WorkerHost"]

_NOSET = "RAY_EXPERIMENTAL_NOSET_"  # ..._CUDA_VISIBLE_DEVICES and its like


@dataclass(frozen=True)
class HostFacts:
    """Where a host found itself."""

    node_id: str
    """Ray's id of the node."""
    address: str
    """The node's address."""
    pid: int
    """Process id on that node."""
    devices: tuple[str, ...]
    """Accelerator ids that Ray assigned to the process."""


class WorkerHost:
    """One worker process. Ray gives it its place first; its rank follows from that."""

    def __init__(self, title: str) -> None:
        self._worker: Any = None
        self._title = title
        self._claim: PortClaim | None = None
        self._cls_with_init: ClassWithInitArgs | None = None

    def facts(self) -> HostFacts:
        """Where this process is; also answers that it runs."""
        context = ray.get_runtime_context()
        devices = [device for ids in context.get_accelerator_ids().values() for device in ids]
        address = ray.util.get_node_ip_address().strip("[]")
        return HostFacts(context.get_node_id(), address, os.getpid(), tuple(map(str, devices)))

    def claim(self, ports: Sequence[int] | None) -> int:
        """Claim a port of this node for the group's rendezvous; held as long as this process lives."""
        self._claim = claim_port(ports)
        return self._claim.port

    def build(self, env: Mapping[str, str], packed: Any) -> None:
        """Build the worker. Raises `RemoteFailure`."""
        os.environ.update(env)
        self._see_own_device()
        if self._claim is not None:
            self._claim.release_for_server()
        try:
            # Small ones come packed; larger ones were put once for all ranks, and Ray has opened them.
            cls_with_init = unpack(packed[0], packed[1:]) if isinstance(packed, tuple | list) else packed
            self._cls_with_init = cls_with_init
            self._worker = cls_with_init.worker_class(*cls_with_init.args, **cls_with_init.kwargs)
        except BaseException as error:
            raise RemoteFailure.of(error) from None

    def _see_own_device(self) -> None:
        """Where Ray must leave visible devices alone, all are visible: the local rank is then the device's id."""
        if any(name.startswith(_NOSET) and os.environ[name] not in ("", "0") for name in os.environ):
            devices = self.facts().devices
            if devices:
                os.environ["LOCAL_RANK"] = devices[0]

    def describe(self) -> Any:
        """The class that runs here, with its arguments, for a program that attaches to the group."""
        return shipped(self._cls_with_init)

    def call(self, head: Sequence[Any], *values: Any) -> Any:
        """Run a call; ``head``: method, role, whether the result is wanted, keyword names, which values are packed."""
        try:
            method, target, wanted = head[:3]
            args, kwargs = _arguments(head, values)
            result = invoke(self._worker, target, method, args, kwargs)
            if inspect.iscoroutine(result):
                result = _finish(result)
            return shipped(result) if wanted else None
        except BaseException as error:
            raise RemoteFailure.of(error) from None

    def __repr__(self) -> str:
        return self._title


class AsyncWorkerHost(WorkerHost):
    """A worker with async methods: they run side by side on one event loop."""

    async def call(self, head: Sequence[Any], *values: Any) -> Any:
        """As `WorkerHost.call`; awaits async methods."""
        try:
            method, target, wanted = head[:3]
            args, kwargs = _arguments(head, values)
            result = invoke(self._worker, target, method, args, kwargs)
            if inspect.iscoroutine(result):
                result = await result
            return shipped(result) if wanted else None
        except BaseException as error:
            raise RemoteFailure.of(error) from None


def _arguments(head: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    names, packed = head[3], head[4]
    opened = [
        unpack(value[0], value[1:]) if is_packed else value for value, is_packed in zip(values, packed, strict=True)
    ]
    first_named = len(opened) - len(names)
    return opened[:first_named], dict(zip(names, opened[first_named:], strict=True))


def _finish(coroutine: Any) -> Any:
    """Run a coroutine to its end in a host that has no event loop."""
    import asyncio  # only here: most workers have no async method

    return asyncio.run(coroutine)
