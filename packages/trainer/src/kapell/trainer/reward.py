"""Reward functions: what they look like, the one that comes with the trainer, and how to load your own."""

from __future__ import annotations

import importlib.util
from collections.abc import Awaitable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from .tasks import reasoning_gym, reverse_digits

__all__ = [
    "RewardError",
    "RewardFunction",
    "RewardTimeoutError",
    "builtin_reward",
    "load_reward_function",
]


class RewardFunction(Protocol):
    """Scores one response: a number, or a mapping with ``score`` and anything else worth logging. May be async."""

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
    ) -> float | Mapping[str, Any] | Awaitable[float | Mapping[str, Any]]:
        """The score of ``solution_str``."""
        ...


class RewardError(RuntimeError):
    """A reward function raised or returned something that is no score; the message names the row."""


class RewardTimeoutError(RewardError):
    """A reward function took too long."""


def builtin_reward(data_sources: Sequence[str]) -> RewardFunction:
    """The reward that comes with the trainer for these data sources. Raises ``ValueError`` where there is none."""
    known: dict[str, RewardFunction] = {reverse_digits.DATA_SOURCE: reverse_digits.score}
    for data_source in data_sources:
        if data_source.startswith(reasoning_gym.PREFIX):
            known[data_source] = reasoning_gym.reward_of(data_source)
        if data_source not in known:
            near = get_close_matches(data_source, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"no reward belongs to data_source {data_source!r}{hint}; known: {', '.join(known)}. "
                "Give your own: reward.custom_reward_function.path=FILE.py reward.custom_reward_function.name=FUNCTION"
            )

    def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> Any:
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
    except (Exception, SystemExit) as error:
        raise ValueError(f"running the reward file {file} failed: {type(error).__name__}: {error}") from error
    return module
