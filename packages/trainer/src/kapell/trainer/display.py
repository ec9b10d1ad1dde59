"""What a run shows in the terminal: a live table of progress, and a summary at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from .generations import samples_table
from .hooks import Hook, RunSummary

__all__ = ["LiveDisplay", "summary_table"]

_KL_NAMES = ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl")
_STAGES = {
    "timing_s/gen": "generate",
    "timing_s/reward": "score",
    "timing_s/old_log_prob": "log-probs",
    "timing_s/ref": "reference",
    "timing_s/values": "values",
    "timing_s/update_critic": "update critic",
    "timing_s/update_actor": "update actor",
    "timing_s/testing": "validate",
}
_SPARK = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40
_PLAIN_LINES = 20  # lines of progress where the output is no terminal


class LiveDisplay(Hook):
    """Shows step, reward, exact match, KL, tokens per second of a worker and time left while a run goes on."""

    def __init__(self, console: Console, *, title: str, folder: Path | None = None, num_samples: int = 0) -> None:
        self._console = console
        self._title = title
        self._folder = folder
        self._num_samples = num_samples
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("steps", total=None)
        self._latest: dict[str, float] = {}
        self._rewards: list[float] = []
        self._total = 0
        self._live: Live | None = None

    def on_start(self, total_steps: int) -> None:
        """Begin to draw."""
        self._total = total_steps
        self._progress.update(self._task, total=total_steps)
        if self._console.is_terminal:
            self._live = Live(self._render(), console=self._console, refresh_per_second=8)
            self._live.start()

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the newest numbers."""
        self._latest.update(metrics)
        if "critic/score/mean" in metrics:
            self._rewards.append(metrics["critic/score/mean"])
        self._progress.update(self._task, completed=step)
        if self._live is not None:
            self._live.update(self._render())
        elif "val/exact_match" in metrics or step % max(1, self._total // _PLAIN_LINES) == 0:
            shown = "  ".join(f"{name} {value}" for name, value in self._numbers())
            self._console.print(f"step {step}/{self._total}  {shown}", highlight=False, soft_wrap=True)

    def on_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Print some of a validation's responses."""
        if self._num_samples:
            self._console.print(samples_table(samples, step=step, num_rows=self._num_samples))

    def on_end(self, summary: RunSummary) -> None:
        """Stop drawing and print the summary."""
        if self._live is not None:
            self._live.stop()
        self._console.print(summary_table(summary, folder=self._folder))

    def _render(self) -> Panel:
        table = Table.grid(padding=(0, 2))
        for name, value in self._numbers():
            table.add_row(f"[dim]{name}[/dim]", value)
        if self._rewards:
            table.add_row("[dim]reward so far[/dim]", f"[cyan]{_sparkline(self._rewards)}[/cyan]")
        return Panel(Group(self._progress, table), title=self._title, expand=True)

    def _numbers(self) -> list[tuple[str, str]]:
        latest = self._latest
        numbers = [
            ("reward", _number(latest.get("critic/score/mean"), ".3f")),
            ("exact match", _number(latest.get("val/exact_match"), ".1%")),
            ("KL", _number(next((latest[name] for name in _KL_NAMES if name in latest), None), ".4f")),
            ("entropy", _number(latest.get("actor/entropy"), ".3f")),
            ("tokens/s a worker", _number(latest.get("perf/throughput"), ",.0f")),
        ]
        return [(name, value) for name, value in numbers if value]


def summary_table(summary: RunSummary, *, folder: Path | None = None) -> Table:
    """First and last values of what matters, where the time went, and where the results are."""
    state = "ended early" if summary.error else "done"
    title = f"Run {state}: {summary.steps} of {summary.total_steps} steps in {summary.seconds:.1f} s"
    table = Table(title=title, min_width=len(title))  # of a run that ended at once there are no rows
    table.add_column("")
    table.add_column("first", justify="right")
    table.add_column("last", justify="right")
    for label, name, form in (
        ("exact match on held-out prompts", "val/exact_match", ".1%"),
        ("reward of held-out prompts", "val/score/mean", ".3f"),
        ("reward while training", "critic/score/mean", ".3f"),
        ("entropy", "actor/entropy", ".3f"),
        ("response length", "response_length/mean", ".2f"),
        ("gradient norm", "actor/grad_norm", ".3f"),
    ):
        if name in summary.last:
            table.add_row(label, _number(summary.first[name], form), _number(summary.last[name], form))
    table.add_section()
    if summary.totals.get("timing_s/step"):
        tokens, seconds = summary.totals["perf/total_num_tokens"], summary.totals["timing_s/step"]
        table.add_row("tokens per second", "", f"{tokens / seconds:,.0f}")
        table.add_row("seconds per step", "", f"{seconds / summary.steps:.3f}")
        for name, label in _STAGES.items():
            if name in summary.totals:
                table.add_row(f"  {label}", "", f"{summary.totals[name] / summary.seconds:.0%} of the time")
    if folder is not None:
        table.caption = f"{folder}"
    return table


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _sparkline(values: list[float]) -> str:
    """The values as a row of bars, averaged down to the width."""
    size = max(1, -(-len(values) // _SPARK_WIDTH))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    scale = (len(_SPARK) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARK[round((mean - low) * scale)] for mean in means)
