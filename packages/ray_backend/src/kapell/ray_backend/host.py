"""The Ray actor around one worker: sets its environment, builds it, runs its methods. Imports as little as it can."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import ray

from kapell.workergroup import CallRunner, ClassWithInitArgs

from .borrowing import borrow_always
from .calling import OpenedCall, opened_call, opened_name, packed_answer
from .devices import device_of_all, visible_devices
from .failures import leaving_error
from .keeping import KeptInRay
from .numbering import number_of_task
from .rendezvous import PortClaim, claim_port
from .shipping import Shipped, shipped

__all__ = ["AsyncWorkerHost", "HostFacts", "WorkerHost"]

_LARGE_BYTES = 1 << 20  # answers from here on may find no room in the store
_KEPT_SIZES = 64  # the controller asks as soon as it learns that there was no room


@dataclass(frozen=True)
class HostFacts:
    """Where a host found itself."""

    actor_id: str
    """Ray's id of the actor."""
    node_id: str
    """Ray's id of the node."""
    address: str
    """The node's address."""
    pid: int
    """Process id on that node."""
    devices: tuple[str, ...]
    """Accelerator ids that Ray assigned to the process."""
    rank: int
    """Rank of the worker in its group; -1 as long as it is not built."""
    world_size: int
    """Workers of its group; 0 as long as it is not built."""

    @property
    def process(self) -> str:
        """Address and process id, as errors name them."""
        return f"{self.address} (pid {self.pid})"


class WorkerHost:
    """One worker process. Ray gives it its place first; its rank follows from that."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._runner: CallRunner | None = None
        self._claim: PortClaim | None = None
        self._cls_with_init: ClassWithInitArgs | None = None
        self._received: dict[int, OpenedCall] = {}  # calls with large arguments that are about to run
        self._keys = count()
        self._large: dict[str, int] = {}  # sizes of the last large answers, by Ray's id of the call

    def facts(self) -> HostFacts:
        """Where this process is; also answers that it runs."""
        context = ray.get_runtime_context()
        devices = [device for ids in context.get_accelerator_ids().values() for device in ids]
        address = ray.util.get_node_ip_address().strip("[]")
        rank, world_size = (-1, 0) if self._runner is None else (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        return HostFacts(
            actor_id=context.get_actor_id() or "",
            node_id=context.get_node_id(),
            address=address,
            pid=os.getpid(),
            devices=tuple(map(str, devices)),
            rank=rank,
            world_size=world_size,
        )

    def visible_devices(self) -> dict[str, str]:
        """The variables that say which accelerators this process sees, and which of them is its own."""
        return {**visible_devices(os.environ), "LOCAL_RANK": os.environ["LOCAL_RANK"]}

    def claim(self, ports: Sequence[int] | None) -> int:
        """Claim a port of this node for the group's rendezvous; held as long as this process lives."""
        try:
            self._claim = claim_port(ports)
        except Exception as error:
            raise leaving_error(error) from None
        return self._claim.port

    def build(self, env: Mapping[str, str], packed: Any, read_only: bool) -> None:
        """Build the worker, which ``packed`` describes. Raises its constructor's error, packed.

        With ``read_only``, references that the worker reads arrive as views, too.
        """
        if read_only:
            borrow_always()
        os.environ.update(env)
        self._see_own_device()
        if self._claim is not None:
            self._claim.release_for_server()
        try:
            # A small one comes packed; a larger one was put once for all ranks, and Ray has opened it.
            made = pickle.loads(packed) if isinstance(packed, bytes) else packed
            self._cls_with_init = made
            worker = made.worker_class(*made.args, **made.kwargs)
            keeper = f"rank {env['RANK']}, {self._title} on {self.facts().process}"
            self._runner = CallRunner(worker, store=KeptInRay(keeper))
        except BaseException as error:
            raise leaving_error(error) from None

    def describe(self) -> Any:
        """The class that runs here, with its arguments, for a program that attaches to the group."""
        return shipped(self._cls_with_init)

    def call(self, head: bytes | int, *apart: Any) -> Any:
        """Run a call that `packed_call` has packed; ``apart`` are the arguments that Ray has opened."""
        return self._answer(_opened(head, apart))

    def receive(self, head: bytes | int, *apart: Any) -> int:
        """Take a call with large arguments and keep it for `call_received`; its key.

        Ray frees what a task was sent when the task ends: the arguments' store is free while the method runs.
        """
        key = next(self._keys)
        self._received[key] = _opened(head, apart)
        return key

    def call_received(self, key: int) -> Any:
        """Run a call that `receive` has taken."""
        return self._answer(self._received.pop(key))

    def call_by_name(self) -> Any:
        """Run a direct call without arguments: its task has its name."""
        return self._answer(_named())

    def answer_bytes(self, task_id: str) -> int:
        """The size of one of the last large answers; 0 when it is not known."""
        return self._large.get(task_id, 0)

    def _answer(self, call: OpenedCall) -> Any:
        assert self._runner is not None
        try:
            return self._packed(call, self._runner.run(call.method, call.args, call.kwargs, **call.options))
        except BaseException as error:
            raise leaving_error(error) from None

    def _packed(self, call: OpenedCall, answer: Any) -> Any:
        """The answer as it goes. Of a large one the size is kept: Ray does not say it when it has no room for it."""
        packed = packed_answer(answer) if call.direct else shipped(answer)
        kind = type(packed)
        nbytes = packed.nbytes if kind is Shipped else len(packed) if kind is bytes else 0
        if nbytes >= _LARGE_BYTES:
            if len(self._large) >= _KEPT_SIZES:
                del self._large[next(iter(self._large))]
            self._large[ray.get_runtime_context().get_task_id() or ""] = nbytes
        return packed

    def _see_own_device(self) -> None:
        """Where Ray must leave visible devices alone, all are visible: the local rank is then the device's id."""
        if device := device_of_all(ray.get_runtime_context().get_accelerator_ids(), os.environ):
            os.environ["LOCAL_RANK"] = device

    def __repr__(self) -> str:
        return self._title


class AsyncWorkerHost(WorkerHost):
    """A worker with async methods: they run side by side on one event loop."""

    async def call(self, head: bytes | int, *apart: Any) -> Any:
        """As `WorkerHost.call`; awaits async methods."""
        return await self._answer_async(_opened(head, apart))

    async def call_received(self, key: int) -> Any:
        """As `WorkerHost.call_received`; awaits async methods."""
        return await self._answer_async(self._received.pop(key))

    async def call_by_name(self) -> Any:
        """As `WorkerHost.call_by_name`; awaits async methods."""
        return await self._answer_async(_named())

    async def _answer_async(self, call: OpenedCall) -> Any:
        assert self._runner is not None
        try:
            return self._packed(call, await self._runner.run_async(call.method, call.args, call.kwargs, **call.options))
        except BaseException as error:
            raise leaving_error(error) from None


def _opened(head: bytes | int, apart: Sequence[Any]) -> OpenedCall:
    try:
        return opened_call(head, apart)
    except BaseException as error:
        raise leaving_error(error) from None


def _named() -> OpenedCall:
    """The call that goes by this task's name."""
    context = ray.get_runtime_context()
    target, method = opened_name(context.get_task_name() or "")
    number = number_of_task(context.get_task_id() or "0")
    return OpenedCall(True, method, (), {}, {"target": target, "number": number})
