"""Rows of a task in verl's format, read from JSONL, parquet, Hugging Face datasets or a generator, and checked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .tasks import reasoning_gym

__all__ = ["DataError", "PromptRow", "read_rows"]


class DataError(ValueError):
    """A file or row that cannot be used; the message names the file and the row."""


@dataclass(frozen=True)
class PromptRow:
    """One prompt of a task."""

    prompt: str | list[dict[str, Any]]
    """Text, or chat messages."""
    ground_truth: Any
    """What the reward compares with."""
    data_source: str
    """The task's name."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    """Anything else that a reward function wants."""
    origin: str = ""
    """File and row, for messages."""

    @property
    def text(self) -> str:
        """The prompt as plain text: message contents in order."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "".join(str(message["content"]) for message in self.prompt)


def read_rows(
    files: Sequence[str | Path], *, prompt_key: str = "prompt", data_source_key: str = "data_source"
) -> list[PromptRow]:
    """All rows of the files, in order.

    A file is JSONL, parquet, a folder that ``datasets`` saved with ``save_to_disk``, or
    ``reasoning_gym:TASK?option=value``. Raises ``FileNotFoundError`` for a missing file and `DataError` for a file or
    row that cannot be used.
    """
    rows = []
    for file in files:
        if reasoning_gym.is_source(file):
            rows += [PromptRow(**values) for values in reasoning_gym.make_rows(str(file))]
            continue
        path = Path(file).expanduser()
        if not path.exists():
            raise FileNotFoundError(f"no data file {path}")
        before = len(rows)
        for number, values in enumerate(_read(path), start=1):
            rows.append(_checked(values, f"{path} row {number}", prompt_key, data_source_key))
        if len(rows) == before:
            raise DataError(f"{path} holds no rows")
    return rows


def _read(path: Path) -> Iterable[Any]:
    if path.is_dir():
        return _read_dataset(path)
    if path.suffix in (".jsonl", ".json"):
        return _read_jsonl(path)
    if path.suffix == ".parquet":
        try:
            return pq.read_table(path).to_pylist()
        except pa.ArrowException as error:
            raise DataError(f"{path} is not a parquet file: {error}") from error
    raise DataError(
        f"{path} has the unknown ending {path.suffix!r}; known: .jsonl, .json (one object a line), .parquet, or a "
        "folder that `datasets` saved with save_to_disk"
    )


def _read_dataset(path: Path) -> Iterable[Any]:
    splits = path / "dataset_dict.json"
    if splits.is_file():
        names = ", ".join(str(path / name) for name in json.loads(splits.read_text())["splits"])
        raise DataError(f"{path} holds several splits; give one of them: {names}")
    if not (path / "state.json").is_file():
        raise DataError(f"{path} is no data set that `datasets` saved with save_to_disk: it has no state.json")
    try:
        from datasets import load_from_disk  # an extra, and slow to import
    except ImportError:
        raise DataError(f"reading {path} needs a package: pip install kapell-trainer[datasets]") from None
    return load_from_disk(str(path))


def _read_jsonl(path: Path) -> Iterator[Any]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")  # some editors put a mark at the beginning
                if text.strip():
                    yield json.loads(text)
            except UnicodeDecodeError as error:
                raise DataError(f"{path} line {number} is not UTF-8: {error}") from error
            except json.JSONDecodeError as error:
                raise DataError(f"{path} line {number} is not valid JSON, one object a line: {error}") from error


def _checked(values: Any, origin: str, prompt_key: str, data_source_key: str) -> PromptRow:
    if not isinstance(values, Mapping):
        raise DataError(
            f"{origin} is a {type(values).__name__}; a row is an object with `{prompt_key}` and `reward_model`"
        )
    reward_model = values.get("reward_model")
    ground_truth = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    if ground_truth is None:
        raise DataError(f"{origin} has no reward_model.ground_truth; fields: {', '.join(values)}")
    data_source = values.get(data_source_key)
    if not isinstance(data_source, str):
        raise DataError(f"{origin} has no text in `{data_source_key}`; fields: {', '.join(values)}")
    extra_info = values.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, Mapping):
        raise DataError(f"{origin}: `extra_info` must be an object, got {extra_info!r}")
    return PromptRow(
        prompt=_checked_prompt(values.get(prompt_key), origin, prompt_key, values),
        ground_truth=ground_truth,
        data_source=data_source,
        extra_info=dict(extra_info or {}),
        origin=origin,
    )


def _checked_prompt(prompt: Any, origin: str, prompt_key: str, values: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt:
        if all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in prompt):
            return [dict(message) for message in prompt]
        raise DataError(f"{origin}: each message in `{prompt_key}` needs `role` and `content`, got {prompt!r}")
    if prompt_key in values:
        raise DataError(f"{origin}: `{prompt_key}` must be text or chat messages and not empty, got {prompt!r}")
    raise DataError(f"{origin} has no `{prompt_key}`; fields: {', '.join(values)}")
