"""Averages over the ranks of a group, the same for workers in processes of their own and for workers that share one.

An average is started and collected apart, so that in-process ranks may run one after the other, without threads: each
has given its part in one call before the first one collects the average in the next.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from kapell.workergroup import current_worker_env

__all__ = [
    "Collective",
    "ProcessGroupCollective",
    "SharedProcessCollective",
    "SingleCollective",
    "join_collective",
    "join_process_group",
]

_DIRECT_BYTES = 4 << 20  # of all ranks together; above it a ring, which moves less, takes as long
_TIMEOUT = timedelta(minutes=10)  # a rank may wait for a peer that is still in a long backward pass


class Collective(ABC):
    """Averages over ranks. Every rank must start the same ones in the same order."""

    @abstractmethod
    def start_average(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Give this rank's part; the function returned gives the average, once all ranks have given theirs."""


class SingleCollective(Collective):
    """A group of one."""

    def start_average(self, tensor: Tensor) -> Callable[[], Tensor]:
        """The average of one part is that part."""
        return lambda: tensor


class ProcessGroupCollective(Collective):
    """One rank per process, over `torch.distributed`'s default group, which must be initialised."""

    def start_average(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to average over all processes, maybe in place; collecting it waits for the last one."""
        num_ranks = dist.get_world_size()
        if tensor.device.type == "cpu" and num_ranks * tensor.nbytes <= _DIRECT_BYTES:
            # All to all: one message each way, where gloo's ring has several, each with its latency.
            parts = [torch.empty_like(tensor) for _ in range(num_ranks)]
            gathered = dist.all_gather(parts, tensor, async_op=True)
            return _when_done(gathered, lambda: torch.stack(parts).mean(0))  # equal on all ranks, bit for bit
        return _when_done(dist.all_reduce(tensor, async_op=True), lambda: tensor.div_(num_ranks))


def _when_done(work: dist.Work | None, result: Callable[[], Tensor]) -> Callable[[], Tensor]:
    assert work is not None

    def finish() -> Tensor:
        work.wait()
        return result()

    return finish


class _Exchange:
    """What the ranks of one in-process group have given so far, by round."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.threads: dict[int, int] = {}
        self.parts: dict[int, dict[int, Tensor]] = {}
        self.averages: dict[int, Tensor] = {}
        self.num_readers: Counter[int] = Counter()


class SharedProcessCollective(Collective):
    """Several ranks in one process, one after the other or each on a thread of its own."""

    def __init__(self, exchange: _Exchange, rank: int, world_size: int) -> None:
        self._exchange = exchange
        self._rank = rank
        self._world_size = world_size
        self._round = 0
        exchange.threads[rank] = threading.get_ident()

    def start_average(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Lay this rank's part down. Collecting too early waits on a thread, and is a ``RuntimeError`` without."""
        number, device = self._round, tensor.device
        self._round += 1
        with self._exchange.changed:
            self._exchange.parts.setdefault(number, {})[self._rank] = tensor
            self._exchange.changed.notify_all()
        return lambda: self._finish(number, device)

    def _finish(self, number: int, device: torch.device) -> Tensor:
        exchange = self._exchange
        with exchange.changed:
            parts = exchange.parts[number]
            on_threads = len(set(exchange.threads.values())) == self._world_size
            timeout = _TIMEOUT.total_seconds() if on_threads else 0.0
            if not exchange.changed.wait_for(lambda: len(parts) == self._world_size, timeout):
                missing = sorted(set(range(self._world_size)) - parts.keys())
                raise RuntimeError(f"ranks {missing} have not given their part of average {number} yet")
            if number not in exchange.averages:
                exchange.averages[number] = torch.stack([parts[rank].to(device) for rank in sorted(parts)]).mean(0)
            average = exchange.averages[number].to(device)
            exchange.num_readers[number] += 1
            if exchange.num_readers[number] == self._world_size:
                del exchange.averages[number], exchange.parts[number], exchange.num_readers[number]
            return average


_exchanges: WeakValueDictionary[tuple[str, ...], _Exchange] = WeakValueDictionary()
_exchanges_lock = threading.Lock()


def join_collective(
    name: str, *, rank: int, world_size: int, address: tuple[str, str], device: torch.device
) -> Collective:
    """The collective of the worker that is being built: ``name`` is its role, ``address`` where its group meets.

    Workers in processes of their own join over gloo, or NCCL between CUDA devices; workers that share this process
    through its memory.
    """
    if world_size == 1:
        return SingleCollective()
    if current_worker_env() is not os.environ:
        with _exchanges_lock:
            exchange = _exchanges.setdefault((name, *address), _Exchange())
        return SharedProcessCollective(exchange, rank, world_size)
    join_process_group(rank=rank, world_size=world_size, address=address, device=device)
    return ProcessGroupCollective()


def join_process_group(*, rank: int, world_size: int, address: tuple[str, str], device: torch.device) -> None:
    """Make the worker's group torch's default process group, where it has none yet.

    Raises ``ValueError`` for workers that share a process, in which torch can have one rank only.
    """
    if current_worker_env() is not os.environ:
        raise ValueError("strategy=fsdp2 needs a process for each worker; use strategy=ddp, or backend=ray")
    if not dist.is_initialized():
        host, port = address
        backend = "gloo"
        if device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(device)  # NCCL works on the process's current device
        dist.init_process_group(
            backend, init_method=f"tcp://{host}:{port}", rank=rank, world_size=world_size, timeout=_TIMEOUT
        )
