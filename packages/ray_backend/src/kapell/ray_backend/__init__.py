"""Kapell worker groups on Ray actors.

Names are loaded when first used: a worker's process imports only the little that runs inside it.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .variables import default_variable

# Under `uv run`, Ray would by default copy the working folder and install a new environment for its workers at each
# start, minutes with torch in it. Workers use the driver's own; where nodes lack it, set the variable to 1.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")


if "ray" not in sys.modules:
    # Only a Ray that was imported with this variable, read on every system, keeps the address 127.0.0.1 when it starts
    # its processes. Joining goes as without it.
    with default_variable("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"):
        import_module("ray")

if TYPE_CHECKING:
    from .attaching import BusyWorkersError
    from .backend import RayBackend
    from .classes import (
        RayClassWithInitArgs,
        create_colocated_worker_cls,
        create_colocated_worker_cls_fused,
        create_colocated_worker_raw_cls,
    )
    from .group import RayWorkerGroup
    from .keeping import LostBatchError
    from .manager import ResourcePoolManager
    from .placement import PlacementTimeoutError
    from .pools import RayResourcePool, SubRayResourcePool, merge_resource_pool, split_resource_pool
    from .preflight import InfeasiblePoolError
    from .rendezvous import PortUnavailableError
    from .session import EndedSessionError, ensure_ray
    from .shipping import parallel_put
    from .start_answers import StartTimeoutError
    from .storing import StoreFullError

__all__ = [
    "BusyWorkersError",
    "EndedSessionError",
    "InfeasiblePoolError",
    "LostBatchError",
    "PlacementTimeoutError",
    "PortUnavailableError",
    "RayBackend",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "StartTimeoutError",
    "StoreFullError",
    "SubRayResourcePool",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "ensure_ray",
    "merge_resource_pool",
    "parallel_put",
    "split_resource_pool",
]

_MODULES = {
    "BusyWorkersError": "attaching",
    "EndedSessionError": "session",
    "InfeasiblePoolError": "preflight",
    "LostBatchError": "keeping",
    "PlacementTimeoutError": "placement",
    "PortUnavailableError": "rendezvous",
    "RayBackend": "backend",
    "RayClassWithInitArgs": "classes",
    "RayResourcePool": "pools",
    "RayWorkerGroup": "group",
    "ResourcePoolManager": "manager",
    "StartTimeoutError": "start_answers",
    "StoreFullError": "storing",
    "SubRayResourcePool": "pools",
    "create_colocated_worker_cls": "classes",
    "create_colocated_worker_cls_fused": "classes",
    "create_colocated_worker_raw_cls": "classes",
    "ensure_ray": "session",
    "merge_resource_pool": "pools",
    "parallel_put": "shipping",
    "split_resource_pool": "pools",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
