"""A worker's place in its group, as torchrun and torch.distributed name it.

A backend with one process per worker puts it into ``os.environ``. An in-process backend has many workers in one process
and gives each its own through a context variable.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

__all__ = ["PROTECTED_ENV", "current_worker_env", "placement_env", "use_worker_env"]

PROTECTED_ENV = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "ASCEND_RT_VISIBLE_DEVICES",
    }
)
"""Names that only the backend sets: a user's value would break rendezvous or device placement."""

_worker_env: ContextVar[Mapping[str, str] | None] = ContextVar("kapell_worker_env", default=None)


def current_worker_env() -> Mapping[str, str]:
    """The environment of the worker that runs now: the in-process worker's own over ``os.environ``."""
    own = _worker_env.get()
    return os.environ if own is None else MappingProxyType({**os.environ, **own})


@contextmanager
def use_worker_env(env: Mapping[str, str]) -> Generator[None]:
    """Make ``env`` the current worker's environment inside the block, in this thread or task only."""
    token = _worker_env.set(env)
    try:
        yield
    finally:
        _worker_env.reset(token)


def placement_env(
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    node_rank: int,
    master_addr: str,
    master_port: int,
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The variables that tell one worker its place, joined with the user's ``extra`` ones.

    Raises ``ValueError`` when ``extra`` names a protected variable or holds a value that is not a string.
    """
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "NODE_RANK": str(node_rank),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
    }
    extra = extra or {}
    if clash := sorted(PROTECTED_ENV & extra.keys()):
        raise ValueError(
            f"worker_env sets {', '.join(clash)}, which the backend sets itself; remove it from worker_env"
        )
    for name, value in extra.items():
        if not isinstance(value, str):
            raise ValueError(f"worker_env[{name!r}] is {value!r} of type {type(value).__name__}; give a string")
    return {**extra, **own}
