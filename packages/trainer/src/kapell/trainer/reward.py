"""Scores responses with a Python function, and says which row was at fault when that function fails."""

from __future__ import annotations

import importlib.util
import logging
import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

from .tasks import reverse_digits

__all__ = [
    "RewardError",
    "RewardFunction",
    "RewardTimeoutError",
    "Scores",
    "builtin_reward",
    "load_reward_function",
    "score_responses",
]

_logger = logging.getLogger(__name__)


class RewardFunction(Protocol):
    """Scores one response: a number, or a mapping with ``score`` and anything else worth logging."""

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
    ) -> float | Mapping[str, Any]:
        """The score of ``solution_str``."""
        ...


class RewardError(RuntimeError):
    """A reward function raised or returned something that is no score; the message names the row."""


class RewardTimeoutError(RewardError):
    """A reward function took too long."""


@dataclass(frozen=True)
class Scores:
    """The scores of some responses."""

    scores: list[float]
    """One per response."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """What else the function returned, one entry per response; None where it returned nothing under that name."""
    num_errors: int = 0
    """Responses that were counted as 0 because the function failed."""


def builtin_reward(data_sources: Sequence[str]) -> RewardFunction:
    """The reward that comes with the trainer for these data sources. Raises ``ValueError`` where there is none."""
    known = {reverse_digits.DATA_SOURCE: reverse_digits.score}
    for data_source in data_sources:
        if data_source not in known:
            near = get_close_matches(data_source, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"no reward belongs to data_source {data_source!r}{hint}; known: {', '.join(known)}. "
                "Give your own: reward.custom_reward_function.path=FILE.py reward.custom_reward_function.name=FUNCTION"
            )

    def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
        return known[data_source](data_source, solution_str, ground_truth, extra_info)

    return score


def load_reward_function(path: str | Path, name: str = "compute_score") -> RewardFunction:
    """The function ``name`` of a Python file.

    Raises ``FileNotFoundError`` for a missing file and ``ValueError`` when it cannot be run or has no such function.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"no reward file {file}")
    module = _run_file(file)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = get_close_matches(name, functions, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has: {', '.join(functions) or 'none'}"
        raise ValueError(f"{file} has no function {name!r}{hint}")
    return function


def _run_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"kapell_reward_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is not a Python file; a reward function lives in a .py file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"running the reward file {file} failed: {type(error).__name__}: {error}") from error
    return module


def score_responses(
    function: RewardFunction,
    *,
    data_sources: Sequence[str],
    solutions: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]],
    timeout: float | None = None,
    on_error: Literal["raise", "zero"] = "raise",
) -> Scores:
    """Score each response. A failure is a `RewardError` that names the row, or a counted 0 with ``on_error="zero"``.

    ``timeout`` is in seconds per response; it needs the main thread of a Unix process, where a signal can interrupt
    the function.
    """
    scores: list[float] = []
    extras: list[Mapping[str, Any]] = []
    num_errors = 0
    with _time_limits(timeout) as limit:
        for row, arguments in enumerate(zip(data_sources, solutions, ground_truths, extra_infos, strict=True)):
            try:
                score, extra = _score_one(function, row, arguments, limit)
            except RewardError as error:
                if on_error == "raise":
                    raise
                if not num_errors:
                    _logger.warning("counted as 0: %s", error)
                score, extra = 0.0, {}
                num_errors += 1
            scores.append(score)
            extras.append(extra)
    names = dict.fromkeys(name for extra in extras for name in extra)
    return Scores(scores, {name: [extra.get(name) for extra in extras] for name in names}, num_errors)


def _score_one(
    function: RewardFunction, row: int, arguments: tuple[str, str, Any, Mapping[str, Any]], limit: Callable[[], None]
) -> tuple[float, Mapping[str, Any]]:
    data_source, solution, ground_truth, _ = arguments
    place = f"row {row} (data_source {data_source!r}, response {solution!r}, ground truth {ground_truth!r})"
    try:
        limit()
        returned = function(*arguments)
    except _TimeIsUp as error:
        raise RewardTimeoutError(f"the reward function took more than {error.seconds:g} s for {place}") from None
    except Exception as error:
        raise RewardError(f"the reward function failed for {place}: {type(error).__name__}: {error}") from error
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise RewardError(f"the reward function returned no 'score' for {place}, only: {', '.join(returned)}")
        return _as_score(returned["score"], place), {k: v for k, v in returned.items() if k != "score"}
    return _as_score(returned, place), {}


def _as_score(value: Any, place: str) -> float:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a numpy or torch scalar
        value = value.item()
    if not isinstance(value, Real):
        raise RewardError(
            f"the reward function returned {value!r} of type {type(value).__name__} for {place}; need a number"
        )
    score = float(value)
    if score != score or score in (float("inf"), float("-inf")):
        raise RewardError(f"the reward function returned {score} for {place}; need a finite number")
    return score


class _TimeIsUp(BaseException):
    """Raised inside the reward function; not an Exception, so that its own handlers let it pass."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


@contextmanager
def _time_limits(seconds: float | None) -> Generator[Callable[[], None]]:
    """A function that gives the code after it ``seconds`` from now on, until it is called again or the block ends."""
    if seconds is None or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield lambda: None
        return
    limit = seconds

    def ring(_number: int, _frame: Any) -> None:
        raise _TimeIsUp(limit)

    previous_handler = signal.signal(signal.SIGALRM, ring)
    previous_timer = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield lambda: (signal.setitimer(signal.ITIMER_REAL, limit), None)[1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)
        signal.setitimer(signal.ITIMER_REAL, *previous_timer)
