"""In-process workers, and the serial kind: each call runs in the caller's own stack, rank by rank."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from .answering import CallRunner, RunTime
from .environment import worker_env
from .errors import LostWorker, RemoteError, error_text
from .failures import failed_start
from .isolation import isolate
from .keeping import KeptHere
from .pool import ClassWithInitArgs
from .transport import show_user_frames, user_traceback
from .workers import RankCall, Workers

__all__ = ["Answer", "LocalWorkers", "SerialWorkers", "private_arguments"]


def private_arguments(call: RankCall) -> tuple[list[Any], dict[str, Any]]:
    """Copies of a call's arguments, made before `submit` returns: what the caller writes later is not the worker's."""
    kwargs = call.kwargs
    return list(map(isolate, call.args)), {name: isolate(kwargs[name]) for name in kwargs} if kwargs else {}


class Answer:
    """The handle of one call: its value or error, once it is done."""

    done: bool = False
    value: Any = None
    error: BaseException | None = None


class LocalWorkers(Workers[Answer]):
    """Workers that are objects of this process; a subclass says where their calls run."""

    def __init__(self, role: str, cls_with_init: ClassWithInitArgs, envs: Sequence[Mapping[str, str]]) -> None:
        self._role = role
        self._cls_with_init = cls_with_init
        self._envs: list[dict[str, str | None]] = [dict(env) for env in envs]
        self._places = [dict(env) for env in envs]
        self._runners: list[CallRunner | None] = [None] * len(envs)
        try:
            self._build_all()
        except BaseException:
            self.close()
            raise

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return len(self._envs)

    def put(self, value: Any, num_readers: int) -> Any:
        """The value itself: each reader gets its own copy when its call is submitted."""
        return value

    def fetch(self, handle: Answer) -> Any:
        """The result; what ends a process elsewhere, such as ``SystemExit``, comes as `RemoteError`."""
        error = handle.error
        if error is None:
            return handle.value
        if isinstance(error, Exception):
            raise error
        raise RemoteError(type(error).__name__, error_text(error), user_traceback(error)) from error

    def is_alive(self, rank: int) -> bool:
        """Whether the worker was neither lost nor closed."""
        return self._runners[rank] is not None

    def environment(self, rank: int) -> Mapping[str, str]:
        """The variables that the worker started with."""
        return self._places[rank]

    def run_times(self, ranks: Sequence[int], timeout: float) -> dict[int, list[RunTime]]:
        """Read where they are kept, however busy the ranks are."""
        return {rank: runner.take_run_times() for rank in ranks if (runner := self._runners[rank])}

    def lose(self, rank: int) -> None:
        """Act as if the worker's process had died."""
        runner, self._runners[rank] = self._runners[rank], None
        if runner is not None:
            self._end(rank, runner)

    def close(self) -> None:
        """Forget the workers."""
        for rank in range(self.world_size):
            LocalWorkers.lose(self, rank)

    @abstractmethod
    def _build_all(self) -> None:
        """Build every worker. Raises `WorkerFailedError`."""

    @abstractmethod
    def _end(self, rank: int, runner: CallRunner) -> None:
        """Let go of what a worker's runner holds."""

    def _build(self, rank: int) -> CallRunner:
        plain = self._cls_with_init
        self._envs[rank] = dict(self._places[rank])
        worker = plain.worker_class(*isolate(plain.args), **isolate(plain.kwargs))
        return CallRunner(worker, receive=isolate, store=KeptHere())

    def _run(self, call: RankCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a call whose arguments are private already."""
        runner = self._runners[call.rank] or self._lost(call.rank)
        return isolate(runner.run(call.method, args, kwargs, **call.run_options()))

    def _lost(self, rank: int) -> NoReturn:
        raise LostWorker(f"rank {rank} of {self._role} was lost; restart it")

    def _error_of(self, answer: Answer) -> Exception:
        """The error of a failed answer as `fetch` raises it."""
        try:
            self.fetch(answer)
        except Exception as error:  # whatever a constructor raised
            return error
        raise AssertionError("the answer holds no error")

    def _answer(self, answer: Answer, rank: int, function: Callable[..., Any], *args: Any) -> None:
        """Run a function as the worker of ``rank`` and note what came of it."""
        token = worker_env.set(self._envs[rank])
        try:
            answer.value = function(*args)
        except BaseException as error:
            show_user_frames(error)
            answer.error = error
        finally:
            worker_env.reset(token)


class SerialWorkers(LocalWorkers):
    """Deterministic: a call is over when it is submitted. ``KeyboardInterrupt`` is the user's and passes through."""

    concurrent = False

    def submit(self, call: RankCall) -> Answer:
        """Run the call here."""
        answer = Answer()
        args, kwargs = private_arguments(call)
        token = worker_env.set(self._envs[call.rank])
        try:
            answer.value = self._run(call, args, kwargs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever the user's method raised
            show_user_frames(error)
            answer.error = error
        finally:
            worker_env.reset(token)
        return answer

    def wait(self, handles: Sequence[Answer], timeout: float | None) -> list[Answer]:
        """All of them."""
        return list(handles)

    def fetch_all(self, handles: Sequence[Answer], timeout: float | None) -> list[Any] | None:
        """All results, unless one failed."""
        values = [handle.value for handle in handles if handle.error is None]
        return values if len(values) == len(handles) else None

    def restart(self, rank: int) -> None:
        """Build the worker anew."""
        self.lose(rank)
        answer = Answer()
        self._answer(answer, rank, self._build, rank)
        self._runners[rank] = self.fetch(answer)

    def _build_all(self) -> None:
        for rank in range(self.world_size):
            answer = Answer()
            self._answer(answer, rank, self._build, rank)
            if isinstance(answer.error, KeyboardInterrupt):
                raise answer.error
            if answer.error is not None:
                raise failed_start(self._role, self.world_size, {rank: self._error_of(answer)})
            self._runners[rank] = answer.value

    def _end(self, rank: int, runner: CallRunner) -> None:
        runner.close()
