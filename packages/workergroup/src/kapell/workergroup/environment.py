"""A worker's place in its group, as torchrun and torch.distributed name it.

A backend with one process per worker puts it into ``os.environ``. An in-process backend has many workers in one process
and gives each its own through a context variable, which ``os.environ`` then shows.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

__all__ = [
    "PROTECTED_ENV",
    "check_worker_env",
    "current_worker_env",
    "placement_env",
    "show_worker_env",
    "use_worker_env",
    "worker_env",
]

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

worker_env: ContextVar[MutableMapping[str, str | None] | None] = ContextVar("kapell_worker_env", default=None)
"""The variables of the in-process worker that runs now, over those of the process; None stands for a deleted one."""


def current_worker_env() -> Mapping[str, str]:
    """The environment of the worker that runs now: the in-process worker's own over ``os.environ``."""
    own = worker_env.get()
    if own is None:
        return os.environ
    merged = {**os.environ, **own}
    return MappingProxyType({name: value for name, value in merged.items() if value is not None})


@contextmanager
def use_worker_env(env: Mapping[str, str]) -> Generator[None]:
    """Make ``env`` the current worker's environment inside the block, in this thread or task only."""
    token = worker_env.set(dict(env))
    try:
        yield
    finally:
        worker_env.reset(token)


def show_worker_env() -> None:
    """Let ``os.environ`` show and take each in-process worker's own variables while that worker runs.

    The process's real environment, which C code and child processes read, never changes. Harmless when repeated.
    """
    # The object itself must change: others hold it by ``from os import environ``.
    os.environ.__class__ = _WorkerEnviron


class _WorkerEnviron(os._Environ[str]):
    """``os.environ`` with the current in-process worker's variables over those of the process."""

    def __getitem__(self, key: str) -> str:
        own = worker_env.get()
        if own is None or key not in own:
            return super().__getitem__(key)
        value = own[key]
        if value is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: str) -> None:
        own = worker_env.get()
        if own is None:
            super().__setitem__(key, value)
        elif not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"str expected, not {type(value).__name__}")
        else:
            own[key] = value

    def __delitem__(self, key: str) -> None:
        own = worker_env.get()
        if own is None:
            super().__delitem__(key)
        else:
            self[key]  # KeyError when it is not there
            own[key] = None

    def __iter__(self) -> Iterator[str]:
        own: Mapping[str, Any] = worker_env.get() or {}
        yield from (key for key in super().__iter__() if key not in own)
        yield from (key for key, value in list(own.items()) if value is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


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
    check_worker_env(extra)
    return {**extra, **own}


def check_worker_env(extra: Mapping[str, str], given_as: str = "worker_env") -> None:
    """Raise ``ValueError`` where a user's variables name a protected one or hold a value that is not a string.

    >>> check_worker_env({"RANK": "3"})
    Traceback (most recent call last):
    ValueError: worker_env sets RANK, which the backend sets itself; remove it from worker_env
    """
    if clash := sorted(PROTECTED_ENV & extra.keys()):
        raise ValueError(
            f"{given_as} sets {', '.join(clash)}, which the backend sets itself; remove it from {given_as}"
        )
    for name, value in extra.items():
        if not isinstance(value, str):
            raise ValueError(f"{given_as}[{name!r}] is {value!r} of type {type(value).__name__}; give a string")
