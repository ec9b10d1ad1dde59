"""The folder of a run: ``metrics.jsonl``, ``samples.jsonl`` and ``curves.png`` beside its configuration and model."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from .durable_files import sync
from .hooks import Hook, RunSummary

__all__ = ["CURVES", "RunFiles", "json_value", "new_run_folder", "plot_curves"]

CURVES: Mapping[str, Sequence[str]] = {
    "reward": ("critic/score/mean", "val/score/mean"),
    "exact match": ("reward/exact_match", "val/exact_match"),
    "entropy": ("actor/entropy",),
    "KL": ("actor/ppo_kl", "actor/kl_loss", "actor/reward_kl_penalty"),
    "response length": ("response_length/mean",),
    "loss": ("actor/pg_loss", "critic/vf_loss"),
    "gradient norm": ("actor/grad_norm", "critic/grad_norm"),
    "seconds per step": ("timing_s/step", "timing_s/gen", "timing_s/update_actor"),
}
"""Titles of the plots and the metrics in each."""

_LOGS = ("metrics.jsonl", "samples.jsonl")


def new_run_folder(path: str | None) -> Path:
    """Create the folder where it does not exist; by default a new one, ``runs/<date and time>``."""
    if path:
        folder = Path(path).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise NotADirectoryError(f"the run's folder cannot be {path}: {error.filename} is a file") from error
        return folder
    name = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    for suffix in itertools.chain([""], (f"-{number}" for number in itertools.count(2))):
        with suppress(FileExistsError):  # of another run that began in this second
            folder = Path("runs") / f"{name}{suffix}"
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("there are more suffixes than folders")


def json_value(value: Any) -> Any:
    """The value as strict JSON has it: tensors and arrays as numbers and lists, NaN and infinity as null.

    >>> json_value({"loss": float("nan"), "n": (1, 2)})
    {'loss': None, 'n': [1, 2]}
    """
    if hasattr(value, "tolist"):  # numpy and torch
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return value if value is None or isinstance(value, str | int) else str(value)


class RunFiles(Hook):
    """Writes the run's numbers as they come, and its curves at the end."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def on_rewind(self, step: int) -> None:
        """Cut the files off before the step."""
        for name in _LOGS:
            if (path := self._folder / name).exists():
                _cut(path, step)

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one JSON object to ``metrics.jsonl``."""
        self._append("metrics.jsonl", {"step": step, **metrics})

    def on_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Append the validation's responses to ``samples.jsonl``."""
        for sample in samples:
            self._append("samples.jsonl", {"step": step, **sample})

    def on_save(self, step: int) -> None:
        """Bring both files to the disk."""
        for name in _LOGS:
            if (path := self._folder / name).exists():
                sync(path)

    def on_end(self, summary: RunSummary) -> None:
        """Draw ``curves.png``."""
        metrics = self._folder / "metrics.jsonl"
        if metrics.exists():
            plot_curves(metrics, self._folder / "curves.png")

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(json_value(values), allow_nan=False) + "\n")


def _cut(path: Path, step: int) -> None:
    """Leave only the lines of earlier steps; a line that was not finished goes too."""
    shorter = path.with_name(f".{path.name}.partial")
    with path.open(encoding="utf-8") as lines, shorter.open("w", encoding="utf-8") as kept:
        for line in lines:
            try:
                earlier = line.endswith("\n") and json.loads(line)["step"] < step
            except json.JSONDecodeError:
                continue
            if earlier:
                kept.write(line)
    sync(shorter)
    shorter.replace(path)


def plot_curves(metrics_file: str | Path, picture: str | Path) -> None:
    """Draw the learning curves of a ``metrics.jsonl`` as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and needed once a run
    from matplotlib.figure import Figure

    lines = Path(metrics_file).read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines if line.strip()]
    present = {
        title: [name for name in names if any(record.get(name) is not None for record in records)]
        for title, names in CURVES.items()
    }
    present = {title: names for title, names in present.items() if names}
    columns = 4
    figure = Figure(figsize=(4 * columns, 3 * max(1, math.ceil(len(present) / columns))), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (title, names) in enumerate(present.items(), start=1):
        axes = figure.add_subplot(math.ceil(len(present) / columns), columns, number)
        for name in names:
            points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
            axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < len(records) / 2 else None)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(picture, dpi=100)
