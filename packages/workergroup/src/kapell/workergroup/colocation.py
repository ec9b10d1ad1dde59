"""Several roles in one worker process: one mechanism behind both of verl's ways, spawn and fuse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from .environment import worker_env
from .isolation import isolate
from .pool import ClassWithInitArgs
from .worker import Worker

__all__ = ["ColocatedWorker", "colocate", "colocated_roles", "colocated_worker_class"]


class ColocatedWorker(Worker):
    """A worker that holds one worker per role, each with its own attributes and meshes, in one process.

    A subclass may add methods of its own that combine the roles; each role is an attribute of its name.
    """

    role_classes: ClassVar[Mapping[str, ClassWithInitArgs]] = {}
    """The roles of a subclass made by `colocated_worker_class`."""

    def __init__(self, roles: Mapping[str, ClassWithInitArgs] | None = None) -> None:
        super().__init__()
        workers: dict[str, Any] = {}
        self.fused_worker_dict = workers
        for name, cls_with_init in (roles or _own_roles(self.role_classes)).items():
            workers[name] = cls_with_init()
            workers[name].fused_worker_dict = workers

    def __getattr__(self, name: str) -> Any:
        roles = self.__dict__.get("fused_worker_dict", {})
        if name in roles:
            return roles[name]
        raise AttributeError(
            f"{type(self).__name__} has neither an attribute nor a role {name!r}; roles: {sorted(roles)}"
        )

    def role_worker(self, role: str) -> Any:
        """The worker of one role. Raises ``KeyError`` that lists the roles."""
        if role not in self.fused_worker_dict:
            raise KeyError(f"no role {role!r} in this process; roles: {sorted(self.fused_worker_dict)}")
        return self.fused_worker_dict[role]


def _own_roles(roles: Mapping[str, ClassWithInitArgs]) -> Mapping[str, ClassWithInitArgs]:
    """The roles of a class with arguments that are this worker's own, also where it shares its process with others."""
    return roles if worker_env.get() is None else isolate(dict(roles))


def colocate(roles: Mapping[str, ClassWithInitArgs]) -> ClassWithInitArgs:
    """One worker class that holds all ``roles`` (name to class with its arguments) in each process."""
    return ClassWithInitArgs(ColocatedWorker, roles=_checked(roles))


def colocated_worker_class(roles: Mapping[str, ClassWithInitArgs]) -> type[ColocatedWorker]:
    """A base class that holds ``roles``, for workers that combine them in methods of their own."""
    return type("ColocatedBase", (ColocatedWorker,), {"role_classes": _checked(roles), "__module__": __name__})


def colocated_roles(cls_with_init: ClassWithInitArgs) -> Mapping[str, ClassWithInitArgs]:
    """The roles that workers of this class hold; empty for an ordinary worker."""
    return cls_with_init.kwargs.get("roles") or getattr(cls_with_init.worker_class, "role_classes", {})


def _checked(roles: Mapping[str, ClassWithInitArgs]) -> dict[str, ClassWithInitArgs]:
    if not roles:
        raise ValueError("no roles to colocate; give at least one, such as {'actor': ClassWithInitArgs(Actor)}")
    _refuse_odd_names(roles)
    return dict(roles)


def _refuse_odd_names(names: Iterable[str]) -> None:
    for name in names:
        if not name.isidentifier() or name.startswith("_"):
            raise ValueError(f"role {name!r} cannot be an attribute; use letters, digits and underscores")
