"""Joining a running Ray, or starting one on this machine."""

from __future__ import annotations

import ipaddress
import logging
import os
from typing import Any

import ray

__all__ = ["ensure_ray"]

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # read by Ray when it is imported, on every system
_MIN_LOGICAL_CPUS = 16  # on a laptop a CPU is a place for a process, not a core: roles outnumber cores


def ensure_ray(
    *,
    address: str = "auto",
    num_cpus: int | None = None,
    dashboard: bool = False,
    namespace: str | None = None,
    **options: Any,
) -> bool:
    """Join the Ray at ``address``; by default the one in ``RAY_ADDRESS`` or on this machine, else start one here.

    A Ray started here has ``num_cpus`` logical CPUs (at least 16 when not given, so that small pools fit any laptop);
    ``address="local"`` starts one in any case. It is asked to stay on the loopback interface; newer versions of Ray do
    so only with ``RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0`` in the environment before Python starts, and say so in the log
    here otherwise. ``options`` go to ``ray.init``. False when this process was connected already.
    """
    if ray.is_initialized():
        return False
    options = {"logging_level": logging.WARNING, "namespace": namespace, **options}
    if address != "local":
        try:
            ray.init(address=address, **options)
        except ConnectionError:
            if address != "auto" or os.environ.get("RAY_ADDRESS"):
                raise  # a cluster was named: starting another one here would hide that it is not there
        else:
            return True
    cpus = num_cpus or max(os.cpu_count() or 1, _MIN_LOGICAL_CPUS)
    logger.info("no Ray is running; starting one with %d logical CPUs", cpus)
    ray.init(address="local", num_cpus=cpus, include_dashboard=dashboard, _node_ip_address=_LOOPBACK, **options)
    _say_where_it_listens()
    return True


def _say_where_it_listens() -> None:
    """Ray replaces a loopback address by the machine's own, unless it is told to stay on one machine."""
    address = ray.util.get_node_ip_address()
    if ipaddress.ip_address(address.strip("[]")).is_loopback:
        return
    guarded = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    logger.log(
        logging.INFO if guarded else logging.WARNING,
        "Ray %s listens at %s and asks whoever connects %s; to keep it on the loopback interface, set %s=0 before "
        "Python starts",
        ray.__version__, address, "for a token" if guarded else "nothing", _ONE_MACHINE,
    )  # fmt: skip
