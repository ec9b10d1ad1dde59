"""Why a run ended early, kept in its folder: the error, and where each worker stood that failed and what it raised."""

from __future__ import annotations

import json
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kapell.workergroup import WorkerFailedError

__all__ = ["RunFailure", "WorkerFailure", "failure_of", "keep_failure", "read_failure"]

_FILE = "failure.json"


@dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """An exception of a worker."""

    place: str
    """Role, rank, method, rows and columns."""
    error: str
    """Type and message."""
    traceback: str
    """The worker's own."""


@dataclass(frozen=True, kw_only=True)
class RunFailure:
    """What ended a run."""

    error: str
    """Type and message."""
    traceback: str
    """The controller's, with what it names as cause."""
    workers: list[WorkerFailure] = field(default_factory=list)
    """The workers that failed, if that was it."""


@contextmanager
def keep_failure(folder: str | Path) -> Generator[None]:
    """Write an exception of the block into the folder as it passes, with a note that says how to read it.

    An older one goes when the block starts.
    """
    file = Path(folder) / _FILE
    file.unlink(missing_ok=True)
    try:
        yield
    except BaseException as error:
        file.write_text(json.dumps(asdict(failure_of(error)), indent=1), encoding="utf-8")
        error.add_note(f"`kapell doctor {folder}` says what is wrong and the way out")
        raise


def read_failure(folder: str | Path) -> RunFailure | None:
    """What `keep_failure` wrote; None where nothing failed. Raises ``ValueError`` for a file that is not whole."""
    file = Path(folder) / _FILE
    if not file.is_file():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        workers = [WorkerFailure(**worker) for worker in values.pop("workers")]
        return RunFailure(**values, workers=workers)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is not whole: {type(error).__name__}: {error}") from error


def failure_of(error: BaseException) -> RunFailure:
    """The error in words."""
    return RunFailure(error=_title(error), traceback=_text(error), workers=list(_workers(error)))


def _workers(error: BaseException) -> Iterator[WorkerFailure]:
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, WorkerFailedError):
        seen = seen.__cause__ or seen.__context__
    if seen is not None:
        for context, exception in zip(seen.contexts, seen.exceptions, strict=False):
            yield WorkerFailure(place=str(context), error=_title(exception), traceback=_text(exception))


def _title(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
