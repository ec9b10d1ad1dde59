"""What goes wrong with a group call, and where: each error names the role, the ranks and the method."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = [
    "BusyRank",
    "CallTimeoutError",
    "GroupClosedError",
    "KapellError",
    "LostWorker",
    "NotRegisteredError",
    "RankContext",
    "RemoteError",
    "error_text",
    "mesh_place_of",
    "picklable",
    "set_mesh_place",
]

_MESH_PLACE = "__kapell_mesh_place__"


class KapellError(Exception):
    """Base of the errors that Kapell's groups raise."""


@dataclass(frozen=True)
class RankContext:
    """Where one rank stood in a call: what an error about it says."""

    role: str
    """Name of the group."""
    rank: int
    """Rank within the group."""
    method: str
    """The method that was called."""
    mesh: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The rank's coordinates in each mesh that its worker registered, such as ``{"train": {"dp": 1, "tp": 0}}``."""
    rows: int | None = None
    """Rows of the batch that the rank got; None when the call splits nothing."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Shape and dtype of each column and array that the rank got."""

    def __str__(self) -> str:
        meshes = "".join(
            f", mesh {name} {' '.join(f'{dimension}={at}' for dimension, at in place.items())}"
            for name, place in self.mesh.items()
        )
        rows = "" if self.rows is None else f" with {self.rows} rows"
        columns = f" ({', '.join(f'{name}: {shape}' for name, shape in self.columns.items())})" if self.columns else ""
        return f"rank {self.rank} of {self.role}{meshes} in {self.method}{rows}{columns}"


def error_text(error: BaseException) -> str:
    """The message of an exception; a faulty ``__str__`` must not hide it."""
    try:
        return str(error)
    except Exception as broken:  # whatever the user's __str__ raises
        return f"<no message: its __str__ raised {type(broken).__name__}>"


def set_mesh_place(error: BaseException, place: Mapping[str, Mapping[str, int]]) -> None:
    """Remember on an exception the mesh coordinates of the worker that raised it; they travel with it."""
    if place:
        setattr(error, _MESH_PLACE, dict(place))


def mesh_place_of(error: BaseException) -> Mapping[str, Mapping[str, int]]:
    """The mesh coordinates of the worker that raised ``error``; empty when it registered no mesh."""
    return getattr(error, _MESH_PLACE, {})


def picklable(results: Mapping[int, Any]) -> dict[int, Any]:
    """The results that can be pickled: an error travels also where some of them cannot."""
    kept = {}
    for rank, result in results.items():
        with suppress(Exception):  # whatever the result's own members raise
            pickle.dumps(result)
            kept[rank] = result
    return kept


class RemoteError(KapellError):
    """Stands for an exception of a worker that could not travel as itself: holds its text and traceback."""

    def __init__(self, type_name: str, message: str, traceback_text: str) -> None:
        super().__init__(type_name, message, traceback_text)
        self.type_name = type_name
        self.message = message
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}\n{self.traceback_text}".rstrip()


class LostWorker(KapellError):  # noqa: N818 - a state of one rank inside WorkerLostError, raised by `Workers.fetch`
    """The process of one worker is gone; ``reason`` is the backend's own account of it."""

    def __init__(self, reason: str, node: str = "") -> None:
        super().__init__(reason, node)
        self.reason = reason
        self.node = node

    def __str__(self) -> str:
        return f"worker process lost{f' on node {self.node}' if self.node else ''}: {self.reason}"


class BusyRank(NamedTuple):
    """A rank that had not answered when a call's time was over."""

    since: float
    """When it was asked, in seconds since the epoch."""
    seconds: float
    """How long ago that was."""
    running: str
    """The oldest call that the rank has not answered: this one, or one before it."""


class CallTimeoutError(KapellError, TimeoutError):
    """A call took longer than its timeout; says which ranks are still busy. Their work is not cancelled."""

    def __init__(
        self,
        role: str,
        method: str,
        timeout: float,
        busy: Mapping[int, BusyRank],
        results: Mapping[int, Any],
    ) -> None:
        super().__init__(role, method, timeout, dict(busy), dict(results))
        self.role = role
        self.method = method
        self.timeout = timeout
        self.busy = dict(busy)
        """The ranks that have not answered."""
        self.results = dict(results)
        """What the other ranks returned; pickling leaves out what cannot be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:  # OSError, a base, keeps three of five arguments
        results = picklable(self.results)
        given = self.role, self.method, self.timeout, self.busy, results
        return type(self), given, {**self.__dict__, "results": results}

    def __str__(self) -> str:
        rows = "".join(
            f"\n  {rank:>5}  {time.strftime('%H:%M:%S', time.localtime(state.since))}  {state.seconds:>8.1f} s"
            f"  {state.running}"
            for rank, state in sorted(self.busy.items())
        )
        return (
            f"{self.role}.{self.method} did not finish within {self.timeout:g} s; {len(self.results)} ranks answered, "
            f"{len(self.busy)} are still busy:\n   rank  since     busy for    in{rows}"
        )


class NotRegisteredError(KapellError, AttributeError):
    """The worker class has no such method for the group, or has it without ``@register``."""

    def __init__(self, name: str, worker_class: str, exists: bool, known: Sequence[str]) -> None:
        super().__init__(name, worker_class, exists, tuple(known))
        self.name = name
        self.worker_class = worker_class
        self.exists = exists
        self.known = tuple(known)

    def __str__(self) -> str:
        said = (
            f"`{self.name}` exists on {self.worker_class} but is not @register-ed; label it, or call it with "
            f"execute_all_sync({self.name!r}, ...)"
            if self.exists
            else f"{self.worker_class} has no method `{self.name}`"
        )
        return f"{said}; registered: {', '.join(self.known) or 'none'}"


class GroupClosedError(KapellError, RuntimeError):
    """The group was shut down; its workers are gone."""

    def __init__(self, role: str) -> None:
        super().__init__(role)
        self.role = role

    def __str__(self) -> str:
        return f"worker group {self.role!r} is closed; create a new one"
