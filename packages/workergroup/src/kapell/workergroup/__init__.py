"""Groups of workers driven by one controller, and the in-process backend. Imports neither torch nor ray."""

from .accounting import CallRecord, RankCost
from .allocator import keep_freed_memory
from .answering import CallRunner, RunTime
from .backend import Backend, BackendNotFoundError, load_backend
from .calls import PendingCall
from .codecs import Codec, register_codec
from .colocation import ColocatedWorker, colocate, colocated_roles, colocated_worker_class
from .environment import PROTECTED_ENV, check_worker_env, current_worker_env, placement_env, use_worker_env
from .errors import (
    BusyRank,
    CallTimeoutError,
    GroupClosedError,
    KapellError,
    LostWorker,
    NotRegisteredError,
    RankContext,
    RemoteError,
)
from .failures import FAILURE_GRACE_SECONDS, WorkerFailedError, WorkerLostError, failed_ranks, failed_start
from .group import CALL_SECONDS, WorkerGroup
from .health import Liveness, RankHealth
from .isolation import isolate
from .local import LocalBackend, LocalWorkerGroup
from .methods import CallOptions, GroupMethod
from .pool import ClassWithInitArgs, ResourcePool
from .recording import Recorder, replay
from .stats import GroupStats, MethodStats, RankStats
from .trace import save_trace
from .transport import PackedError, error_parts, pack_error
from .worker import Worker
from .workers import RankCall, Workers

__all__ = [
    "CALL_SECONDS",
    "FAILURE_GRACE_SECONDS",
    "PROTECTED_ENV",
    "Backend",
    "BackendNotFoundError",
    "BusyRank",
    "CallOptions",
    "CallRecord",
    "CallRunner",
    "CallTimeoutError",
    "ClassWithInitArgs",
    "Codec",
    "ColocatedWorker",
    "GroupClosedError",
    "GroupMethod",
    "GroupStats",
    "KapellError",
    "Liveness",
    "LocalBackend",
    "LocalWorkerGroup",
    "LostWorker",
    "MethodStats",
    "NotRegisteredError",
    "PackedError",
    "PendingCall",
    "RankCall",
    "RankContext",
    "RankCost",
    "RankHealth",
    "RankStats",
    "Recorder",
    "RemoteError",
    "ResourcePool",
    "RunTime",
    "Worker",
    "WorkerFailedError",
    "WorkerGroup",
    "WorkerLostError",
    "Workers",
    "check_worker_env",
    "colocate",
    "colocated_roles",
    "colocated_worker_class",
    "current_worker_env",
    "error_parts",
    "failed_ranks",
    "failed_start",
    "isolate",
    "keep_freed_memory",
    "load_backend",
    "pack_error",
    "placement_env",
    "register_codec",
    "replay",
    "save_trace",
    "use_worker_env",
]
