"""Worker classes with their arguments and Ray options, and several roles in one process by verl's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kapell.workergroup import ClassWithInitArgs, ColocatedWorker, colocate, colocated_worker_class

__all__ = [
    "RayClassWithInitArgs",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
]


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class (plain or already ``ray.remote``-d) with its constructor's arguments and options of its actors."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls, *args, **kwargs)
        self.fused_worker_used = False
        self._options: dict[str, Any] = {}
        self._additional_resource: dict[str, Any] = {}

    @property
    def worker_class(self) -> type:
        """The plain Python class behind ``cls``."""
        return getattr(self.cls, "__ray_actor_class__", self.cls)

    @property
    def options(self) -> dict[str, Any]:
        """Ray options of the actors, such as ``max_concurrency`` and ``runtime_env``.

        Those of `update_options` win over those that ``ray.remote`` was given.
        """
        declared = getattr(self.cls, "_default_options", None) or {}
        return {**declared, **self._options, **self._additional_resource}

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Set Ray options for the groups made from this object."""
        self._options.update(options)

    def set_additional_resource(self, additional_resource: Mapping[str, Any]) -> None:
        """Ask for other resources for each worker, as Ray options such as ``{"num_cpus": 0.5}``.

        They are a part of what a process of the pool holds: CPUs and accelerators.
        """
        self._additional_resource = dict(additional_resource)

    def __reduce__(self) -> tuple[Any, ...]:
        # The plain class travels: a worker builds it without Ray.
        return _rebuild, (type(self), self.worker_class, self.args, self.kwargs)


def _rebuild(kind: type, cls: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return kind(cls, *args, **kwargs)


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> RayClassWithInitArgs:
    """One worker class that holds all roles in each process; ``group.spawn(roles)`` gives a group per role."""
    joined = colocate(class_dict)
    both = RayClassWithInitArgs(joined.cls, *joined.args, **joined.kwargs)
    both.fused_worker_used = True
    return both


def create_colocated_worker_cls_fused(class_dict: Mapping[str, ClassWithInitArgs]) -> RayClassWithInitArgs:
    """As `create_colocated_worker_cls`; verl has two names for the two mechanisms that are one here."""
    return create_colocated_worker_cls(class_dict)


def create_colocated_worker_raw_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> type[ColocatedWorker]:
    """A base class that holds all roles, for a worker that combines them; ``group.fuse(roles)`` adds their groups."""
    return colocated_worker_class(class_dict)
