"""The error of a call in which ranks failed: one exception group with every failing rank and the others' results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from .errors import KapellError, LostWorker, RankContext, error_text, mesh_place_of, picklable
from .transport import PackedError, pack_error

__all__ = ["FAILURE_GRACE_SECONDS", "WorkerFailedError", "WorkerLostError", "failed_ranks", "failed_start"]

# When one rank fails, others often fail for the same reason a moment later: report them together, but don't wait for a
# rank that hangs in a collective with the failed one.
FAILURE_GRACE_SECONDS = 1.0


class WorkerFailedError(KapellError, ExceptionGroup):
    """One or more ranks raised. ``exceptions`` are the workers' own, each with a note that says where it happened.

    ``failures`` maps each failing rank to its exception, ``contexts`` says where each stood, ``results`` maps the ranks
    that had finished to what they returned, and ``unfinished`` lists ranks that were still running. The group stays
    usable. ``except*`` selects by the workers' own exception types. Pickling leaves out results that cannot be pickled.
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
            f"first: {type(error).__name__}: {error_text(error)} [{first}]"
        )
        contexts = [context for context, _ in ordered]
        return kind(message, [error for _, error in ordered], contexts, results=results, unfinished=unfinished)

    @property
    def failures(self) -> dict[int, Exception]:
        """Each failing rank's exception."""
        return {context.rank: error for context, error in zip(self.contexts, self.exceptions, strict=False)}

    def derive(self, excs: Sequence[Exception]) -> WorkerFailedError:
        """Keep the contexts of the selected exceptions, so that ``except*`` and ``split`` lose nothing."""
        contexts = []
        for error in excs:
            # A selected part of a nested group is a new object, with the same leaves.
            leaves = {id(leaf) for leaf in _leaves(error)}
            contexts += [
                context
                for context, own in zip(self.contexts, self.exceptions, strict=False)
                if any(id(leaf) in leaves for leaf in _leaves(own))
            ][:1]
        return type(self)(self.message, excs, contexts, results=self.results, unfinished=self.unfinished)

    def __reduce__(self) -> tuple[Any, ...]:
        packed = [pack_error(error) for error in self.exceptions]
        return _rebuild, (type(self), self.message, packed), {**self.__dict__, "results": picklable(self.results)}


class WorkerLostError(WorkerFailedError):
    """At least one rank's process died in the call; ``results`` holds the others' answers, ``restart`` revives it."""


def failed_ranks(
    role: str, method: str, world_size: int, failures: Mapping[int, Exception], unfinished: Sequence[int] = ()
) -> WorkerFailedError:
    """The error of ranks that failed, where nothing else is known of the call: as `WorkerFailedError.of`."""
    contexts = [(RankContext(role, rank, method, mesh_place_of(error)), error) for rank, error in failures.items()]
    return WorkerFailedError.of(contexts, world_size=world_size, results={}, unfinished=unfinished)


def failed_start(role: str, world_size: int, failures: Mapping[int, Exception]) -> WorkerFailedError:
    """The error of a group whose constructor failed on some ranks; the backend has torn the others down."""
    return failed_ranks(role, "__init__", world_size, failures)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error


def _rebuild(cls: type[WorkerFailedError], message: str, packed: Sequence[PackedError]) -> WorkerFailedError:
    return cls(message, [error.unpack() for error in packed])
