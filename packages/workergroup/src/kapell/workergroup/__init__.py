"""Groups of workers driven by one controller, and the in-process backend. Imports neither torch nor ray."""

from .backend import Backend, BackendNotFoundError, load_backend
from .calls import GroupMethod, PendingCall
from .colocation import ColocatedWorker, colocate, colocated_roles, colocated_worker_class
from .environment import PROTECTED_ENV, current_worker_env, placement_env, use_worker_env
from .errors import (
    CallTimeoutError,
    GroupClosedError,
    KapellError,
    LostWorker,
    NotRegisteredError,
    RankContext,
    RemoteError,
    WorkerFailedError,
    WorkerLostError,
)
from .group import WorkerGroup
from .isolation import isolate
from .local import LocalBackend, LocalWorkerGroup
from .pool import ClassWithInitArgs, ResourcePool
from .worker import Worker
from .workers import RankCall, Workers, invoke

__all__ = [
    "PROTECTED_ENV",
    "Backend",
    "BackendNotFoundError",
    "CallTimeoutError",
    "ClassWithInitArgs",
    "ColocatedWorker",
    "GroupClosedError",
    "GroupMethod",
    "KapellError",
    "LocalBackend",
    "LocalWorkerGroup",
    "LostWorker",
    "NotRegisteredError",
    "PendingCall",
    "RankCall",
    "RankContext",
    "RemoteError",
    "ResourcePool",
    "Worker",
    "WorkerFailedError",
    "WorkerGroup",
    "WorkerLostError",
    "Workers",
    "colocate",
    "colocated_roles",
    "colocated_worker_class",
    "current_worker_env",
    "invoke",
    "isolate",
    "load_backend",
    "placement_env",
    "use_worker_env",
]
