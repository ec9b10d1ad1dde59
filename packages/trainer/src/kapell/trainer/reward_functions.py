"""Scores rows with a Python function, plain or async; what goes wrong with a row is that row's outcome."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, Protocol

from .config_checks import require_positive
from .reward import RewardError, RewardFunction, RewardTimeoutError
from .time_limit import TimeIsUp, time_limit

__all__ = ["FunctionReward", "Outcome", "Reward", "RewardRows", "RowScore", "ThreadedReward", "read_score"]

_MAX_SHOWN = 200  # characters of a value in a message
# A function of the user's that calls sys.exit, or awaits what was cancelled, does not end the run unseen.
_FAILURES = (Exception, SystemExit, asyncio.CancelledError)
_LOOP_GRACE_SECONDS = 5.0  # an event loop later than all its rows' limits by this much is blocked


@dataclass(frozen=True, kw_only=True)
class RewardRows:
    """Responses to be scored, one entry of each column per row."""

    data_sources: Sequence[str]
    """Names of the tasks."""
    solutions: Sequence[str]
    """Responses as text."""
    ground_truths: Sequence[Any]
    """What they are compared with."""
    extra_infos: Sequence[Mapping[str, Any]]
    """Anything else that came with the prompts."""
    model_scores: Sequence[float] | None = None
    """Scores of a reward model, where the run has one."""

    def __len__(self) -> int:
        return len(self.solutions)

    def arguments(self, row: int) -> tuple[str, str, Any, Mapping[str, Any]]:
        """What a reward function gets for the row."""
        return self.data_sources[row], self.solutions[row], self.ground_truths[row], self.extra_infos[row]

    def place(self, row: int) -> str:
        """The row in words, for messages; long texts are cut."""
        truth = _shown(self.ground_truths[row])
        response = _shown(self.solutions[row])
        return f"row {row} (data_source {self.data_sources[row]!r}, response {response}, ground truth {truth})"


@dataclass(frozen=True)
class RowScore:
    """The score of a row."""

    score: float
    """The score, finite."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What else the reward returned."""


Outcome = RowScore | RewardError
"""A row's score, or why it has none."""


class Reward(Protocol):
    """Scores rows: one outcome each, in order. May be lazy, so that whoever raises the first error stops it."""

    def __call__(self, rows: RewardRows) -> Iterator[Outcome]:
        """The outcomes."""
        ...


@dataclass(frozen=True, kw_only=True)
class FunctionReward:
    """Calls a function row by row.

    A plain function runs one row at a time. At its limit a signal interrupts it in the main thread of a Unix process;
    elsewhere it is left behind in a thread of its own. An async function runs on an event loop in a thread of its own,
    ``concurrency`` rows at once; one that blocks that loop is found out, and each row it leaves behind is a
    `RewardTimeoutError`.
    """

    function: RewardFunction
    """``(data_source, solution_str, ground_truth, extra_info)`` to a number, or a mapping with ``score``."""
    timeout: float | None = None
    """Seconds that one row may take."""
    concurrency: int = 16
    """Rows at once, for an async function."""

    def __post_init__(self) -> None:
        require_positive(self, "concurrency")

    def __call__(self, rows: RewardRows) -> Iterator[Outcome]:
        """The outcomes, in order."""
        if _is_async(self.function):
            yield from self._on_loop(rows)
        else:
            with time_limit(self.timeout) as limited:
                for row in range(len(rows)):
                    yield _outcome(rows, row, partial(limited, self._call(rows, row)))

    def _call(self, rows: RewardRows, row: int) -> Callable[[], Any]:
        return partial(self.function, *rows.arguments(row))

    def _on_loop(self, rows: RewardRows) -> list[Outcome]:
        done: dict[int, Outcome] = {}

        async def all_rows() -> None:
            free = asyncio.Semaphore(self.concurrency)

            async def one(row: int) -> None:
                async with free:
                    clock = asyncio.timeout(self.timeout)
                    try:
                        async with clock:
                            returned = await self._call(rows, row)()
                    except _FAILURES as error:  # also the function's own TimeoutError
                        done[row] = self._late(rows, row) if clock.expired() else _failure(error, rows.place(row))
                    else:
                        done[row] = _outcome(rows, row, lambda: returned)

            await asyncio.gather(*(one(row) for row in range(len(rows))))

        turns = -(-len(rows) // self.concurrency)
        limit = None if self.timeout is None else turns * self.timeout + _LOOP_GRACE_SECONDS
        if not _Loop.run(all_rows(), limit):
            assert limit is not None
            for row in range(len(rows)):
                text = f"{_too_long(limit, rows.place(row))}: an async reward blocks its event loop"
                done.setdefault(row, RewardTimeoutError(text))
        return [done[row] for row in range(len(rows))]

    def _late(self, rows: RewardRows, row: int) -> RewardTimeoutError:
        assert self.timeout is not None
        return RewardTimeoutError(_too_long(self.timeout, rows.place(row)))


@dataclass(frozen=True, kw_only=True)
class ThreadedReward:
    """Calls a function that bounds its own time, such as `kapell.trainer.code_reward.CodeReward`, in threads."""

    function: RewardFunction
    """As of `FunctionReward`, but not async."""
    concurrency: int = 4
    """Rows at once."""

    def __post_init__(self) -> None:
        require_positive(self, "concurrency")

    def __call__(self, rows: RewardRows) -> Iterator[Outcome]:
        """The outcomes, in order."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            try:
                yield from pool.map(
                    lambda row: _outcome(rows, row, partial(self.function, *rows.arguments(row))), range(len(rows))
                )
            finally:
                pool.shutdown(cancel_futures=True)


def read_score(returned: Any, place: str) -> RowScore:
    """What a reward function returned as a score. Raises `RewardError` for anything that is none.

    >>> read_score({"score": 0.0, "reward": 1.0}, "row 3")
    RowScore(score=0.0, extra={'reward': 1.0})
    """
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise RewardError(f"the reward returned no 'score' for {place}, only: {', '.join(map(str, returned))}")
        return RowScore(
            _as_number(returned["score"], place), {k: _plain(v) for k, v in returned.items() if k != "score"}
        )
    return RowScore(_as_number(returned, place))


def _as_number(value: Any, place: str) -> float:
    value = _plain(value)
    if not isinstance(value, Real):
        kind = type(value).__name__
        raise RewardError(f"the reward returned {_shown(value)} of type {kind} for {place}; need a number")
    score = float(value)
    if score != score or score in (float("inf"), float("-inf")):
        raise RewardError(f"the reward returned {score} for {place}; need a finite number")
    return score


def _plain(value: Any) -> Any:
    """A scalar of numpy or torch as Python's; anything else as it is."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def _shown(value: Any) -> str:
    text = repr(value)
    half = _MAX_SHOWN // 2
    return text if len(text) <= _MAX_SHOWN else f"{text[:half]}...{text[-half:]}"


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _outcome(rows: RewardRows, row: int, call: Callable[[], Any]) -> Outcome:
    place = rows.place(row)
    try:
        return read_score(call(), place)
    except TimeIsUp as error:
        return RewardTimeoutError(_too_long(error.seconds, place))
    except _FAILURES as error:
        return _failure(error, place)


def _failure(error: BaseException, place: str) -> RewardError:
    if isinstance(error, RewardError) and place in str(error):
        return error
    failure = RewardError(f"the reward failed for {place}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _too_long(seconds: float, place: str) -> str:
    return f"the reward took more than {seconds:g} s for {place}"


class _Loop:
    """The event loop of async rewards: one for the process, so that a function may keep its connections."""

    _current: asyncio.AbstractEventLoop | None = None

    @classmethod
    def run(cls, coroutine: Any, timeout: float | None) -> bool:
        """Whether the coroutine ended in time; a loop that it blocks is left to itself."""
        if cls._current is None:
            cls._current = asyncio.new_event_loop()
            threading.Thread(target=cls._current.run_forever, name="kapell-rewards", daemon=True).start()
        try:
            asyncio.run_coroutine_threadsafe(coroutine, cls._current).result(timeout)
        except TimeoutError:
            cls._current = None
            return False
        return True
