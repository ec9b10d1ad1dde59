"""One Ray session per server, with the same settings for everyone."""

from __future__ import annotations

import os

import ray

__all__ = ["restart_ray", "start_ray"]


def start_ray() -> None:
    """Start Ray once; it ends with the process."""
    if not ray.is_initialized():
        # As Kapell sets it where it starts Ray: memory of the store is free at once, for everyone.
        os.environ.setdefault("RAY_free_objects_batch_size", "1")
        ray.init(
            address="local",
            num_cpus=16,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=1_500_000_000,
        )


def restart_ray() -> None:
    """End the session and start a fresh one."""
    if ray.is_initialized():
        ray.shutdown()
    start_ray()
