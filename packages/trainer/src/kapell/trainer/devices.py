"""The device on which a worker computes. Batches travel on the CPU: columns are moved there as they are needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from kapell.workergroup import keep_freed_memory

from .algorithms import Metric

__all__ = ["DeviceType", "memory_metrics", "moved", "set_up_process", "worker_device"]

DeviceType = Literal["cpu", "cuda"]

_GIB = 2**30


def set_up_process(kind: DeviceType, *, local_rank: int, torch_threads: int) -> torch.device:
    """Ready this process for a worker's computations; its `worker_device`.

    Sets torch's number of threads and, where it computes on the CPU, has freed memory kept (`keep_freed_memory`).
    """
    torch.set_num_threads(torch_threads)
    if kind == "cpu":
        keep_freed_memory()
    return worker_device(kind, local_rank=local_rank)


def worker_device(kind: DeviceType, *, local_rank: int) -> torch.device:
    """The device of the worker with this position on its node: with ``cuda``, one of those that its process sees.

    Raises ``ValueError`` where it sees none.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            f"trainer.device=cuda, but torch {torch.__version__} finds no CUDA device in the worker's process; set "
            "trainer.device=cpu, or give the workers' machines a GPU, its driver and a torch that is built for CUDA"
        )
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def moved(columns: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The columns on a device; those that are there already are not copied."""
    return {name: column.to(device) for name, column in columns.items()}


def memory_metrics(device: torch.device) -> dict[str, Metric]:
    """The most memory of a CUDA device that tensors had, and that torch held for them, since the start, in GiB."""
    if device.type != "cuda":
        return {}
    return {
        "perf/max_memory_allocated_gb": Metric.max(torch.cuda.max_memory_allocated(device) / _GIB),
        "perf/max_memory_reserved_gb": Metric.max(torch.cuda.max_memory_reserved(device) / _GIB),
    }
