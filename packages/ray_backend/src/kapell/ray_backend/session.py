"""Joining a running Ray, or starting one on this machine alone."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray

__all__ = ["ensure_ray"]

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_MIN_LOGICAL_CPUS = 16  # on a laptop a CPU is a place for a process, not a core: roles outnumber cores


def ensure_ray(
    *, num_cpus: int | None = None, dashboard: bool = False, namespace: str | None = None, **options: Any
) -> bool:
    """Join Ray if this process, ``RAY_ADDRESS`` or this machine has one; else start it here. True when it was started.

    A Ray started here uses the loopback interface and has ``num_cpus`` logical CPUs (at least 16 when not given, so
    that small pools fit any laptop). ``options`` go to ``ray.init``.
    """
    if ray.is_initialized():
        return False
    options.setdefault("log_to_driver", True)
    options.setdefault("logging_level", logging.WARNING)
    try:
        ray.init(address="auto", namespace=namespace, **options)
    except ConnectionError:
        if os.environ.get("RAY_ADDRESS"):
            raise  # a cluster was named: starting another one here would hide that it is not there
    else:
        return False
    cpus = num_cpus or max(os.cpu_count() or 1, _MIN_LOGICAL_CPUS)
    logger.info("no Ray is running; starting one on %s with %d logical CPUs", _LOOPBACK, cpus)
    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=dashboard,
        namespace=namespace,
        _node_ip_address=_LOOPBACK,
        **options,
    )
    return True
