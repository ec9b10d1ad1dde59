"""Backends by name: found through the entry points ``kapell.backends`` of installed packages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import TracebackType
from typing import Any, ClassVar, Self

from .errors import KapellError
from .group import WorkerGroup
from .pool import ClassWithInitArgs, ResourcePool

__all__ = ["Backend", "BackendNotFoundError", "load_backend"]

_ENTRY_POINTS = "kapell.backends"
_DISTRIBUTIONS = {"ray": "kapell-ray-backend", "local": "kapell-workergroup"}


class Backend(ABC):
    """Makes pools and groups, and releases them together when closed."""

    name: ClassVar[str]
    """The name under which `load_backend` finds it."""
    concurrent: bool = True
    """Whether the ranks of a group run side by side."""

    @abstractmethod
    def resource_pool(self, process_on_nodes: Sequence[int], **options: Any) -> ResourcePool:
        """Reserve processes: one entry per node. ``options`` are the backend's own.

        Every backend takes ``use_gpu=True``, for an accelerator per process where it hands them out.
        """

    @abstractmethod
    def worker_group(
        self,
        pool: ResourcePool,
        cls_with_init: ClassWithInitArgs,
        *,
        role: str = "",
        worker_env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> WorkerGroup:
        """Start one worker per process of the pool; raises the constructor's own error, with every worker torn down."""

    @abstractmethod
    def close(self) -> None:
        """Shut down every group and pool made here. Harmless when repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class BackendNotFoundError(KapellError, LookupError):
    """No installed package offers a backend of that name."""

    def __init__(self, name: str, installed: Sequence[str]) -> None:
        super().__init__(name, tuple(installed))
        self.name = name
        self.installed = tuple(installed)

    def __str__(self) -> str:
        close = get_close_matches(self.name, [*self.installed, *_DISTRIBUTIONS], n=1)
        if self.name in _DISTRIBUTIONS:
            hint = f"; install it with `pip install {_DISTRIBUTIONS[self.name]}`"
        elif close:
            hint = f"; did you mean {close[0]!r}?"
        else:
            hint = f"; a package offers one by an entry point in the group {_ENTRY_POINTS!r}"
        return f"no backend {self.name!r} is installed (installed: {', '.join(self.installed) or 'none'}){hint}"


def load_backend(name: str) -> type[Backend]:
    """The backend class of that name, such as ``"local"`` or ``"ray"``.

    Raises `BackendNotFoundError`, which says what is installed and what to install.

    >>> load_backend("local").name
    'local'
    """
    from importlib.metadata import entry_points  # a seventh of the import time, for programs that name their backend

    found = {point.name: point for point in entry_points(group=_ENTRY_POINTS)}
    if name not in found:
        raise BackendNotFoundError(name, sorted(found))
    return found[name].load()
