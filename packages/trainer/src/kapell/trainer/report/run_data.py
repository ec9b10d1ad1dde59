"""What a run's folder holds, read back: numbers per step, responses, and the configuration with its provenance."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..nested import dotted

__all__ = ["Points", "RunData", "load_run"]

Points = list[tuple[float, float]]
"""Steps and values of one metric, in order."""


@dataclass(frozen=True)
class RunData:
    """A run as its folder tells it."""

    name: str
    """The folder's name."""
    records: list[dict[str, Any]]
    """The lines of ``metrics.jsonl``."""
    samples: dict[int, list[dict[str, Any]]]
    """The responses of each validation, by step."""
    config: dict[str, Any]
    """Dotted keys and values."""
    origins: dict[str, str]
    """Where each value came from that is no default."""

    def metric_names(self) -> list[str]:
        """Names of all metrics that have a number, sorted."""
        names = {name for record in self.records for name, value in record.items() if _is_number(value)}
        return sorted(names - {"step"})

    def points(self, metric: str) -> Points:
        """The metric over the steps; steps without it are left out."""
        return [(record["step"], record[metric]) for record in self.records if _is_number(record.get(metric))]

    def first_and_last(self, metric: str) -> tuple[float, float] | None:
        """The metric's first and last value; None where it has none."""
        points = self.points(metric)
        return (points[0][1], points[-1][1]) if points else None


def load_run(folder: str | Path) -> RunData:
    """Read a run's folder. Raises ``FileNotFoundError`` where it holds no ``metrics.jsonl``.

    A run that is still going, or was killed in the middle of a line, can be read too.
    """
    path = Path(folder).expanduser()
    if not (path / "metrics.jsonl").is_file():
        raise FileNotFoundError(f"{path} holds no run: it has no metrics.jsonl (trainer.logger must include file)")
    samples: dict[int, list[dict[str, Any]]] = {}
    for sample in _lines(path / "samples.jsonl"):
        samples.setdefault(sample["step"], []).append(sample)
    return RunData(
        name=path.resolve().name,
        records=list(_lines(path / "metrics.jsonl")),
        samples=samples,
        config=dict(dotted(_read_yaml(path / "config.yaml"))),
        origins=_read_yaml(path / "config_origins.yaml"),
    )


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    if not file.is_file():
        return
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:  # the last line of a run that was killed
            return


def _read_yaml(file: Path) -> dict[str, Any]:
    return (yaml.safe_load(file.read_text(encoding="utf-8")) or {}) if file.is_file() else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
