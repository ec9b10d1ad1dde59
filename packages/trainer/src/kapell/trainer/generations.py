"""Responses to read: one JSONL file per step of training or validation, and a table for the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from .config import TrainerConfig
from .hooks import Hook
from .resume import Resume
from .run_folder import json_value

__all__ = ["GenerationFiles", "generation_files", "read_samples", "samples_table"]

_SHOWN_CHARACTERS = 400


class GenerationFiles(Hook):
    """Writes ``<folder>/<step>.jsonl`` with a line per response.

    It has verl's ``input, output, gts, score, step``, then ``uid``, ``data_source``, ``exact_match`` and what the
    rewards returned beside the score.
    """

    def __init__(self, *, rollouts: str | Path | None = None, validation: str | Path | None = None) -> None:
        self._rollouts = None if rollouts is None else Path(rollouts).expanduser()
        self._validation = None if validation is None else Path(validation).expanduser()

    def require_unused(self, own: Path) -> None:
        """Raise ``FileExistsError`` where a folder holds the responses of another run, which would be written over.

        What lies in the folder ``own`` is the run's own.
        """
        for _, file in self._files():
            if file.resolve().is_relative_to(own.resolve()):
                continue
            raise FileExistsError(
                f"{file.parent} holds the responses of another run already; give trainer.rollout_data_dir and "
                "trainer.validation_data_dir other folders (relative ones are in the run's own)"
            )

    def on_rewind(self, step: int) -> None:
        """Delete the files of later steps."""
        for number, file in self._files():
            if number > step:
                file.unlink()

    def on_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a training step's responses."""
        if self._rollouts is not None:
            _write(self._rollouts, step, rows)

    def on_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write a validation's responses."""
        if self._validation is not None:
            _write(self._validation, step, samples)

    def _files(self) -> Iterator[tuple[int, Path]]:
        """The step and the file of all that is there."""
        for folder in filter(None, (self._rollouts, self._validation)):
            for file in sorted(folder.glob("*.jsonl")):
                if file.stem.isdecimal():
                    yield int(file.stem), file


def generation_files(trainer: TrainerConfig, folder: Path, resume: Resume) -> GenerationFiles | None:
    """What keeps the responses of a run in ``folder``; None where nothing does.

    Relative folders are in the run's own. Raises ``FileExistsError`` for one with another run's responses.
    """
    rollouts, validation = trainer.rollout_data_dir, trainer.validation_data_dir
    if rollouts is None and validation is None:
        return None
    files = GenerationFiles(
        rollouts=None if rollouts is None else folder / Path(rollouts).expanduser(),
        validation=None if validation is None else folder / Path(validation).expanduser(),
    )
    if not resume.goes_on(folder, "trainer.rollout_data_dir", "trainer.validation_data_dir"):
        files.require_unused(folder)
    return files


def _write(folder: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{step}.jsonl").open("w", encoding="utf-8") as file:
        for row in rows:
            line = {
                "input": row["prompt"],
                "output": row["response"],
                "gts": row["ground_truth"],
                "score": row["score"],
                "step": step,
                "uid": row["uid"],
                "data_source": row["data_source"],
                "exact_match": row["exact_match"],
                **row["reward_extra"],
            }
            file.write(json.dumps(json_value(line), allow_nan=False) + "\n")


def read_samples(folder: str | Path, *, step: int | None = None) -> list[dict[str, Any]]:
    """The validation responses in a run's ``samples.jsonl``, of one step or of the last.

    Raises ``FileNotFoundError`` where there is no such file and ``ValueError`` where the step has none.
    """
    file = Path(folder).expanduser() / "samples.jsonl"
    if not file.is_file():
        raise FileNotFoundError(f"no samples in {folder}: {file.name} is written at each validation")
    samples = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    steps = sorted({sample["step"] for sample in samples})
    wanted = steps[-1] if step is None and steps else step
    chosen = [sample for sample in samples if sample["step"] == wanted]
    if not chosen:
        known = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"{file} has no samples of step {wanted}; it has those of {known}")
    return chosen


def samples_table(samples: Sequence[Mapping[str, Any]], *, step: int, num_rows: int) -> Table:
    """The first rows as a table; right ones are green."""
    right = sum(sample["exact_match"] == 1.0 for sample in samples)
    table = Table(title=f"validation after step {step}: {right} of {len(samples)} right")
    for name, justify in (("task", "left"), ("prompt", "left"), ("response", "left"), ("wanted", "left")):
        table.add_column(name, justify=justify, overflow="fold")
    table.add_column("score", justify="right")
    for sample in samples[:num_rows]:
        texts = (sample.get("data_source", ""), sample["prompt"], sample["response"], sample["ground_truth"])
        style = "green" if sample["exact_match"] == 1.0 else None
        table.add_row(*(escape(_cut(str(text))) for text in texts), f"{sample['score']:.3g}", style=style)
    if len(samples) > num_rows:
        table.caption = f"{len(samples) - num_rows} more"
    return table


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
