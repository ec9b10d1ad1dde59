"""Any task of the package ``reasoning-gym`` as a source of rows, each scored by the task's own ``score_answer``.

A source is written ``reasoning_gym:TASK?size=1000&seed=1`` with the options of the task; ``size`` and ``seed`` decide
which rows there are. Two sources with different seeds may share rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl

import yaml

__all__ = ["PREFIX", "is_source", "make_rows", "reward_of"]

PREFIX = "reasoning_gym/"
"""What the rows' ``data_source`` begins with; the task's name follows."""
_SCHEME = "reasoning_gym:"


def is_source(file: str | Path) -> bool:
    """Whether this is no file but a source of generated rows."""
    return str(file).startswith(_SCHEME)


def make_rows(source: str) -> Iterator[dict[str, Any]]:
    """The fields of `kapell.trainer.rows.PromptRow` for each row of the task.

    Raises ``ValueError`` for a task or option that does not exist, and where the package is missing.
    """
    task, _, query = source.removeprefix(_SCHEME).partition("?")
    gym = _package()
    _check_task(task)
    options = {name: yaml.safe_load(value) for name, value in parse_qsl(query, strict_parsing=bool(query))}
    _check_options(source, task, options)
    try:
        entries = gym.create_dataset(task, **options)
    except (AssertionError, TypeError, ValueError) as error:  # the package checks its options by assertions
        raise ValueError(f"{source}: {error}") from error
    for number, entry in enumerate(entries, start=1):
        yield {
            "prompt": [{"role": "user", "content": entry["question"]}],
            "ground_truth": entry["answer"],
            "data_source": f"{PREFIX}{task}",
            "extra_info": {"entry": entry},
            "origin": f"{source} row {number}",
        }


def reward_of(data_source: str) -> Any:
    """The reward function of a task's rows: its own score, and whether the response is just the answer."""
    task = data_source.removeprefix(PREFIX)
    gym = _package()
    _check_task(task)
    score_answer = gym.get_score_answer_fn(task)

    def score(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
    ) -> Mapping[str, float]:
        answer = solution_str.strip()
        return {
            "score": float(score_answer(answer, extra_info["entry"])),
            "exact_match": float(answer == str(ground_truth).strip()),
        }

    return score


def _package() -> ModuleType:
    try:
        import reasoning_gym  # an extra, and slow to import
    except ImportError:
        raise ValueError(
            "a source reasoning_gym:TASK needs a package: pip install kapell-trainer[reasoning-gym]"
        ) from None
    return reasoning_gym


def _check_task(task: str) -> None:
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        close = get_close_matches(task, DATASETS, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {len(DATASETS)}, such as chain_sum"
        raise ValueError(f"reasoning_gym has no task {task!r}; {hint}")


def _check_options(source: str, task: str, options: Mapping[str, Any]) -> None:
    from reasoning_gym.factory import DATASETS

    config: Any = DATASETS[task][1]
    known = [field.name for field in fields(config)]
    for name in options:
        if name not in known:
            raise ValueError(f"{source}: the task has no option {name!r}; it has: {', '.join(known)}")
