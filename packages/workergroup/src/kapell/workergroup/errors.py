"""What goes wrong with a group call, and where: each error names the role, the ranks and the method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

__all__ = [
    "CallTimeoutError",
    "GroupClosedError",
    "KapellError",
    "LostWorker",
    "NotRegisteredError",
    "RankContext",
    "RemoteError",
    "WorkerFailedError",
    "WorkerLostError",
]


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
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Data-parallel rank by mesh name, as far as the controller knows it."""
    rows: int | None = None
    """Rows of the batch that the rank got; None when the call splits nothing."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Shape and dtype of each column that the rank got."""

    def __str__(self) -> str:
        place = "".join(f", {name} dp {dp_rank}" for name, dp_rank in self.mesh.items())
        rows = "" if self.rows is None else f" with {self.rows} rows"
        columns = f" ({', '.join(f'{name}: {shape}' for name, shape in self.columns.items())})" if self.columns else ""
        return f"rank {self.rank} of {self.role}{place} in {self.method}{rows}{columns}"


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


class WorkerFailedError(KapellError, ExceptionGroup):
    """One or more ranks raised. ``exceptions`` are the workers' own, each with a note that says where it happened.

    ``failures`` maps each failing rank to its exception, ``contexts`` says where each stood, ``results`` maps the ranks
    that had finished to what they returned, and ``unfinished`` lists ranks that were still running. The group stays
    usable. ``except*`` selects by the workers' own exception types.
    """

    def __new__(
        cls, message: str, exceptions: Sequence[Exception], contexts: Sequence[RankContext] = (), **state: Any
    ) -> Self:
        """Make the group of ``exceptions``; what else belongs to the error is set by ``__init__``."""
        return super().__new__(cls, message, exceptions)

    def __init__(
        self,
        message: str,
        exceptions: Sequence[Exception],
        contexts: Sequence[RankContext] = (),
        *,
        results: Mapping[int, Any] | None = None,
        unfinished: Sequence[int] = (),
    ) -> None:
        super().__init__(message, exceptions)
        self.contexts = tuple(contexts)
        self.results = dict(results or {})
        self.unfinished = tuple(unfinished)

    @classmethod
    def of(
        cls,
        failures: Sequence[tuple[RankContext, Exception]],
        *,
        world_size: int,
        results: Mapping[int, Any],
        unfinished: Sequence[int],
    ) -> WorkerFailedError:
        """Compose the error for the failing ranks; a lost process among them makes it a `WorkerLostError`."""
        ordered = sorted(failures, key=lambda failure: failure[0].rank)
        for context, error in ordered:
            note = f"[{context}]"
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        first, error = ordered[0]
        ranks = ", ".join(str(context.rank) for context, _ in ordered)
        lost = any(isinstance(error, LostWorker) for _, error in ordered)
        kind = WorkerLostError if lost else WorkerFailedError
        message = (
            f"{first.role}.{first.method} {'lost' if lost else 'failed on'} rank {ranks} of {world_size}; "
            f"first: {type(error).__name__}: {error} [{first}]"
        )
        contexts = [context for context, _ in ordered]
        return kind(message, [error for _, error in ordered], contexts, results=results, unfinished=unfinished)

    @property
    def failures(self) -> dict[int, Exception]:
        """Each failing rank's exception."""
        return {context.rank: error for context, error in zip(self.contexts, self.exceptions, strict=False)}

    def derive(self, excs: Sequence[Exception]) -> WorkerFailedError:
        """Keep the contexts of the selected exceptions, so that ``except*`` and ``split`` lose nothing."""
        kept = {id(error) for error in excs}
        contexts = [c for c, error in zip(self.contexts, self.exceptions, strict=False) if id(error) in kept]
        return type(self)(self.message, excs, contexts, results=self.results, unfinished=self.unfinished)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.exceptions, self.contexts, self.results, self.unfinished)


class WorkerLostError(WorkerFailedError):
    """At least one rank's process died in the call; ``results`` holds the others' answers, ``restart`` revives it."""


def _rebuild(
    cls: type[WorkerFailedError],
    message: str,
    exceptions: Sequence[Exception],
    contexts: Sequence[RankContext],
    results: Mapping[int, Any],
    unfinished: Sequence[int],
) -> WorkerFailedError:
    return cls(message, exceptions, contexts, results=results, unfinished=unfinished)


class CallTimeoutError(KapellError, TimeoutError):
    """A call took longer than its timeout; says which ranks are still busy. Their work is not cancelled."""

    def __init__(
        self,
        role: str,
        method: str,
        timeout: float,
        busy: Mapping[int, float],
        results: Mapping[int, Any] | None = None,
    ) -> None:
        super().__init__(role, method, timeout, dict(busy), dict(results or {}))
        self.role = role
        self.method = method
        self.timeout = timeout
        self.busy = dict(busy)
        """Seconds since the call was sent, for each rank that has not answered."""
        self.results = dict(results or {})

    def __str__(self) -> str:
        rows = "\n".join(f"  {rank:>5}  {seconds:>8.1f} s" for rank, seconds in sorted(self.busy.items()))
        return (
            f"{self.role}.{self.method} did not finish within {self.timeout:g} s; {len(self.results)} ranks answered, "
            f"{len(self.busy)} are still busy:\n   rank  busy for\n{rows}"
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
