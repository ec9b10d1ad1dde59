"""Experiment trackers as hooks: imported when they are named, given numbers that they take, and failing alone."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .durable_files import replace_text
from .hooks import Hook, RunSummary

__all__ = [
    "LOGGERS",
    "MLflowLogger",
    "MissingLoggerError",
    "TensorBoardLogger",
    "TrackerLogger",
    "TrackioLogger",
    "WandbLogger",
    "build_loggers",
    "flat_numbers",
]

_SHOWN_SAMPLES = 16  # of each validation; samples.jsonl has them all
_NOT_IN_MLFLOW = re.compile(r"[^\w\-. :/]")


class MissingLoggerError(ImportError, ValueError):
    """A logger's package is not installed; the message says how to install it."""

    def __init__(self, logger: str) -> None:
        super().__init__(logger)
        self.logger = logger

    def __str__(self) -> str:
        install = f"pip install kapell-trainer[{self.logger}]"
        return f"trainer.logger={self.logger} needs a package that is missing: {install}"


def flat_numbers(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Each number with its name: tensors and arrays as numbers, the parts of mappings and lists as ``name/part``.

    Text and None are left out, NaN and infinity are not.

    >>> dict(flat_numbers({"a": True, "b": {"c": [1, None]}, "d": "text"}))
    {'a': 1.0, 'b/c/0': 1.0}
    """
    for name, value in metrics.items():
        if hasattr(value, "tolist"):  # numpy and torch
            value = value.tolist()
        if isinstance(value, list | tuple):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, Mapping):
            yield from ((f"{name}/{part}", number) for part, number in flat_numbers(value))
        elif isinstance(value, bool | int | float):
            yield str(name), float(value)


class TrackerLogger(Hook):
    """What the trackers have in common; a tracker says how to begin, to log and to end.

    Nothing is begun before the run starts, so that a tracker that cannot be reached is reported like any failing hook.
    A run that goes on from a checkpoint goes on in the tracker too, which may get some steps twice, with equal numbers.
    """

    name = ""
    """What ``trainer.logger`` and the extra call it."""
    module = ""
    """What is imported."""

    def __init__(self, folder: str | Path, *, project: str, experiment: str, config: Mapping[str, Any]) -> None:
        self._folder = Path(folder)
        self._project = project
        self._experiment = experiment
        self._config = dict(config)
        self._rewound_to: int | None = None
        try:
            self._tracker: Any = importlib.import_module(self.module)
        except ImportError as error:
            raise MissingLoggerError(self.name) from error

    def on_rewind(self, step: int) -> None:
        """Go on with the tracker's run of before."""
        self._rewound_to = step

    def _run_before(self) -> str | None:
        """The tracker's name for the run that is gone on with; None for a new one."""
        path = self._run_file()
        return path.read_text(encoding="utf-8") if self._rewound_to is not None and path.exists() else None

    def _remember_run(self, run: str) -> None:
        replace_text(self._run_file(), run)

    def _run_file(self) -> Path:
        return self._folder / f"{self.name}_run.txt"

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the step's numbers."""
        self._log(dict(flat_numbers(metrics)), step)

    def _log(self, numbers: dict[str, float], step: int) -> None:
        raise NotImplementedError


class TensorBoardLogger(TrackerLogger):
    """Event files in ``RUN/tensorboard``, for ``tensorboard --logdir``."""

    name, module = "tensorboard", "torch.utils.tensorboard"

    def on_start(self, total_steps: int) -> None:
        """Open the event file and note the configuration."""
        # TensorBoard leaves out the numbers, though not the texts, that earlier files hold of this and of later steps.
        self._writer = self._tracker.SummaryWriter(str(self._folder / "tensorboard"), purge_step=self._rewound_to)
        rows = [f"| `{key}` | {_cell(value)} |" for key, value in self._config.items()]
        self._writer.add_text("config", "\n".join(["| key | value |", "|---|---|", *rows]), 0)

    def _log(self, numbers: dict[str, float], step: int) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def on_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log some of a validation's samples as a table."""
        columns, rows = _table(samples)
        lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
        self._writer.add_text("val/samples", "\n".join(f"| {' | '.join(line)} |" for line in lines), step)

    def on_end(self, summary: RunSummary) -> None:
        """Close the event file."""
        self._writer.close()


class WandbLogger(TrackerLogger):
    """Weights & Biases; its own environment variables (``WANDB_API_KEY``, ``WANDB_MODE=offline``, ...) apply."""

    name = module = "wandb"

    def on_start(self, total_steps: int) -> None:
        """Begin a run."""
        before = self._run_before()
        resume = {} if before is None else {"id": before, "resume": "allow"}
        self._run = self._tracker.init(
            project=self._project, name=self._experiment, config=self._config, dir=str(self._folder), **resume
        )
        self._remember_run(str(self._run.id))

    def _log(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def on_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log some of a validation's samples as a table."""
        columns, rows = _table(samples)
        table = self._tracker.Table(columns=columns, data=[[str(value) for value in row] for row in rows])
        self._run.log({"val/samples": table}, step=step)

    def on_end(self, summary: RunSummary) -> None:
        """End the run, as failed where it ended early."""
        self._run.finish(exit_code=0 if summary.error is None else 1)


class TrackioLogger(TrackerLogger):
    """Trackio, which keeps its runs on this machine: ``trackio show``."""

    name = module = "trackio"

    def on_start(self, total_steps: int) -> None:
        """Begin a run."""
        resume = {} if self._rewound_to is None else {"resume": "allow"}  # by its name
        self._tracker.init(project=self._project, name=self._experiment, config=self._config, **resume)

    def _log(self, numbers: dict[str, float], step: int) -> None:
        self._tracker.log(numbers, step=step)

    def on_end(self, summary: RunSummary) -> None:
        """End the run."""
        self._tracker.finish()


class MLflowLogger(TrackerLogger):
    """MLflow, at ``MLFLOW_TRACKING_URI``. NaN and infinity are left out; signs that no name may have become ``_``."""

    name = module = "mlflow"

    def on_start(self, total_steps: int) -> None:
        """Begin a run."""
        self._tracker.set_experiment(self._project)
        if (before := self._run_before()) is not None:
            self._tracker.start_run(run_id=before)  # whose parameters cannot change any more
            return
        run = self._tracker.start_run(run_name=self._experiment)
        self._remember_run(str(run.info.run_id))
        self._tracker.log_params({key: str(value)[:500] for key, value in self._config.items()})

    def _log(self, numbers: dict[str, float], step: int) -> None:
        values = {
            _NOT_IN_MLFLOW.sub("_", name.replace("@", "_at_")): number
            for name, number in numbers.items()
            if math.isfinite(number)
        }
        self._tracker.log_metrics(values, step=step)

    def on_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log some of a validation's samples as a table."""
        columns, rows = _table(samples)
        texts = {column: [str(row[place]) for row in rows] for place, column in enumerate(columns)}
        self._tracker.log_table(texts, f"samples/step_{step}.json")

    def on_end(self, summary: RunSummary) -> None:
        """End the run, as failed where it ended early."""
        self._tracker.end_run("FINISHED" if summary.error is None else "FAILED")


LOGGERS: Mapping[str, type[TrackerLogger]] = {
    logger.name: logger for logger in (TensorBoardLogger, WandbLogger, MLflowLogger, TrackioLogger)
}
"""The trackers by their names in ``trainer.logger``."""


def build_loggers(
    names: Sequence[str], folder: str | Path, *, project: str, experiment: str, config: Mapping[str, Any]
) -> list[TrackerLogger]:
    """The trackers among the names of ``trainer.logger``. Raises `MissingLoggerError` for one that is not installed."""
    trackers = [LOGGERS[name] for name in names if name in LOGGERS]
    return [tracker(folder, project=project, experiment=experiment, config=config) for tracker in trackers]


def _table(samples: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of the first samples; what only some have is None for the others."""
    shown = samples[:_SHOWN_SAMPLES]
    columns = list(dict.fromkeys(name for sample in shown for name in sample))
    return columns, [[sample.get(name) for name in columns] for sample in shown]


def _cell(value: Any) -> str:
    """The value as a cell of a Markdown table."""
    return str(value).replace("|", "\\|").replace("\n", " ")
