"""The bundled task: answer a string of four digits with its reverse, such as ``1234`` with ``4321``.

As a script it writes the files: ``python -m kapell.trainer.tasks.reverse_digits FOLDER --seed 1``.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["DATA_SOURCE", "main", "make_rows", "score", "write_files"]

DATA_SOURCE = "reverse_digits"
_NUM_DIGITS = 4


def make_rows(*, seed: int, num_val: int = 200) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and validation rows: all strings of four digits, dealt by ``seed``; no string is in both.

    >>> train, val = make_rows(seed=1)
    >>> texts = [{row["prompt"][0]["content"] for row in rows} for rows in (train, val)]
    >>> len(texts[0]), len(texts[1]), texts[0] & texts[1]
    (9800, 200, set())
    """
    total = 10**_NUM_DIGITS
    if not 0 < num_val < total:
        raise ValueError(f"num_val must lie between 1 and {total - 1}, got {num_val}")
    numbers = list(range(total))
    random.Random(seed).shuffle(numbers)
    return _rows(numbers[num_val:], "train"), _rows(numbers[:num_val], "val")


def _rows(numbers: Sequence[int], split: str) -> list[dict[str, Any]]:
    texts = [f"{number:0{_NUM_DIGITS}d}" for number in numbers]
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": text}],
            "ability": "copy",
            "reward_model": {"style": "rule", "ground_truth": text[::-1]},
            "extra_info": {"split": split, "index": index},
        }
        for index, text in enumerate(texts)
    ]


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None) -> float:
    """Share of positions with the right character; what is missing or too much counts as wrong.

    >>> score("reverse_digits", "4399", "4321"), score("reverse_digits", "43219", "4321")
    (0.5, 0.8)
    """
    right = sum(given == wanted for given, wanted in zip(solution_str, ground_truth, strict=False))
    return right / max(len(solution_str), len(ground_truth))


def write_files(folder: str | Path, *, seed: int, num_val: int = 200) -> tuple[Path, Path]:
    """Write ``train.jsonl`` and ``val.jsonl`` into ``folder`` and return their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "val.jsonl"
    for path, rows in zip(paths, make_rows(seed=seed, num_val=num_val), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the task's files from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="where train.jsonl and val.jsonl are written")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-val", type=int, default=200, help="prompts held out for validation")
    options = parser.parse_args(arguments)
    write_files(options.folder, seed=options.seed, num_val=options.num_val)


if __name__ == "__main__":
    main()
