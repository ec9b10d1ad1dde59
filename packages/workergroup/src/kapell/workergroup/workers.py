"""The backend contract: the processes behind a group, and what runs inside each of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kapell.decorators import spec_of

__all__ = ["RankCall", "Workers", "invoke"]

HandleT = TypeVar("HandleT")


@dataclass(frozen=True, slots=True)
class RankCall:
    """One rank's share of a group call."""

    rank: int
    """The rank that runs it."""
    method: str
    """Name of the worker's method."""
    args: tuple[Any, ...] = ()
    """Positional arguments; entries may be what `Workers.put` returned."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments, likewise."""
    target: str = ""
    """Role inside a colocated worker; empty for the worker itself."""
    wanted: bool = True
    """Whether the result is collected; otherwise the worker answers None, so that nothing travels for nothing."""


class Workers(ABC, Generic[HandleT]):
    """The processes (or threads, or objects) behind a group: all that a backend implements besides making them.

    A handle stands for one submitted call. Calls of one rank run in the order they were submitted.
    """

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of workers."""

    @abstractmethod
    def put(self, value: Any, num_readers: int) -> Any:
        """Make an argument that ``num_readers`` ranks read ready to be sent, serializing it at most once."""

    @abstractmethod
    def submit(self, call: RankCall) -> HandleT:
        """Start a call and return at once (in process it may run right here). Never raises the worker's own error."""

    @abstractmethod
    def wait(self, handles: Sequence[HandleT], timeout: float | None) -> list[HandleT]:
        """Those of ``handles`` that are done: at least one, unless ``timeout`` seconds passed first."""

    @abstractmethod
    def fetch(self, handle: HandleT) -> Any:
        """The result of a finished call. Raises the worker's exception (or `RemoteError` for it), or `LostWorker`."""

    def fetch_all(self, handles: Sequence[HandleT], timeout: float | None) -> list[Any] | None:
        """A short cut that a backend may offer: all results at once, or None when a call failed or is not done yet."""
        return None

    @abstractmethod
    def is_alive(self, rank: int) -> bool:
        """Whether the worker's process answers."""

    @abstractmethod
    def restart(self, rank: int) -> None:
        """Build the worker anew with its constructor arguments."""

    @abstractmethod
    def close(self) -> None:
        """End all workers and release what they hold. Called once."""


def invoke(worker: Any, target: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one call inside a worker's process: find the role, fetch arguments that are futures, call the method.

    Returns what the method returns; for an async method that is a coroutine, which the backend awaits.
    """
    owner = worker.role_worker(target) if target else worker
    bound = getattr(owner, method)
    spec = spec_of(bound)
    if spec is None or spec.materialize_futures:
        args = [_materialize(value) for value in args]
        kwargs = {name: _materialize(value) for name, value in kwargs.items()}
    return bound(*args, **kwargs)


def _materialize(value: Any) -> Any:
    return value.get() if getattr(type(value), "__kapell_future__", False) else value
