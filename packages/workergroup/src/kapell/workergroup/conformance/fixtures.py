"""The groups that the tests share, made on the fixture ``backend`` of whoever imports them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ..backend import Backend
from ..colocation import colocate
from ..group import WorkerGroup
from ..pool import ClassWithInitArgs
from .workers import Checker, Critic, Scorer

__all__ = ["colocated_group", "concurrent", "fragile_group", "group", "make_group", "pool"]


@pytest.fixture(scope="module")
def concurrent(backend: Backend) -> bool:
    """Whether ranks run side by side."""
    return backend.concurrent


@pytest.fixture(scope="module")
def pool(backend: Backend) -> Any:
    """Four processes, shared by the groups of the module."""
    return backend.resource_pool([4])


@pytest.fixture(scope="module")
def group(backend: Backend, pool: Any) -> Iterator[WorkerGroup]:
    """Four workers in a mesh ``train`` of two data-parallel ranks by two; no test breaks it."""
    made = backend.worker_group(pool, ClassWithInitArgs(Checker, base=10), role="checker", worker_env={"COLOR": "blue"})
    with made as group:
        yield group


@pytest.fixture(scope="module")
def colocated_group(backend: Backend) -> Iterator[WorkerGroup]:
    """Two processes that hold a scorer and a critic each."""
    roles = {"scorer": ClassWithInitArgs(Scorer), "critic": ClassWithInitArgs(Critic, scale=3)}
    with backend.worker_group(backend.resource_pool([2]), colocate(roles)) as group:
        yield group


@pytest.fixture
def fragile_group(backend: Backend) -> Iterator[WorkerGroup]:
    """Two workers that a test may lose or leave busy."""
    with backend.worker_group(backend.resource_pool([2]), ClassWithInitArgs(Checker, base=10), role="fragile") as group:
        yield group


@pytest.fixture
def make_group(backend: Backend) -> Iterator[Callable[..., WorkerGroup]]:
    """Makes a small group for one test: ``make_group(num_workers, cls_with_init, **options)``."""
    groups: list[WorkerGroup] = []

    def make(num_workers: int, cls_with_init: ClassWithInitArgs, **options: Any) -> WorkerGroup:
        made = backend.worker_group(backend.resource_pool([num_workers]), cls_with_init, **options)
        groups.append(made)
        return made

    yield make
    for made in groups:
        made.close()
