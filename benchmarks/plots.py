"""Scaling series as log-log pictures."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from .harness import Benchmark, Result

__all__ = ["plot_scaling"]

_COLUMNS = 3


def plot_scaling(benchmark: Benchmark, result: Result, folder: Path) -> Path | None:
    """One panel per metric with at least three sizes, slopes in the legends; None when there is nothing to show."""
    axis = benchmark.axis
    metrics = [
        metric
        for metric in benchmark.units
        if any(result.slope(contender.name, metric, axis) is not None for contender in benchmark.contenders)
    ]
    if not axis or not metrics:
        return None
    columns = min(len(metrics), _COLUMNS)
    rows = -(-len(metrics) // columns)
    figure, panels = plt.subplots(
        rows, columns, figsize=(4.6 * columns, 3.6 * rows), squeeze=False, layout="constrained"
    )
    for panel in panels.flat[len(metrics) :]:
        panel.remove()
    for panel, metric in zip(panels.flat, metrics, strict=False):
        for contender in benchmark.contenders:
            slope = result.slope(contender.name, metric, axis)
            if slope is None:
                continue
            series = [s for s in result.series if (s.contender, s.metric) == (contender.name, metric)]
            sizes = [s.size[axis] for s in series]
            panel.plot(sizes, [s.median for s in series], marker="o", label=f"{contender.name} ({slope:.2f})")
            panel.fill_between(sizes, [s.quartiles[0] for s in series], [s.quartiles[1] for s in series], alpha=0.2)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel(axis.replace("_", " "))
        panel.set_ylabel(f"{metric} [{benchmark.units[metric]}]")
        panel.grid(which="both", alpha=0.25)
        panel.legend(fontsize=7, title="slope", title_fontsize=7)
    figure.suptitle(benchmark.title, fontsize=10)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{benchmark.name}.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
