"""Results as tables: medians, spread, ratios, slopes and budgets, for the terminal and for docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .harness import Benchmark, Budget, Result, Size
from .machine import machine_line

__all__ = ["Verdict", "format_value", "markdown", "verdicts"]


@dataclass(frozen=True)
class Verdict:
    """A budget beside its figure."""

    budget: Budget
    figure: str
    met: bool | None
    """None when it could not be measured."""


def format_value(value: float, unit: str) -> str:
    """A number for people.

    >>> format_value(0.00123, "s"), format_value(2**21, "B")
    ('1.23 ms', '2.1 MB')
    """
    if unit == "s":
        for factor, name in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
            if value * factor >= 1:
                return f"{value * factor:.3g} {name}"
        return f"{value * 1e6:.2g} µs"
    if unit == "B":
        for factor, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
            if value >= factor:
                return f"{value / factor:.1f} {name}"
        return f"{value:.0f} B"
    return f"{value:,.0f} {unit}".rstrip() if value >= 100 else f"{value:.3g} {unit}".rstrip()


def verdicts(benchmark: Benchmark, result: Result) -> Iterator[Verdict]:
    """Each budget with its figure."""
    for budget in benchmark.budgets:
        ours = budget.ours or benchmark.contenders[0].name
        series = result.find(ours, budget.metric, budget.size)
        unit = benchmark.units[budget.metric]
        if series is None:
            yield Verdict(budget, "not measured", None)
        elif budget.kind == "absolute":
            yield Verdict(budget, format_value(series.median, unit), series.median <= budget.limit)
        elif budget.kind == "more":
            peer = result.find(budget.peer, budget.metric, budget.size)
            if peer is None:
                yield Verdict(budget, f"{budget.peer} not measured", None)
                continue
            more = series.median - peer.median
            sign = "+" if more >= 0 else "-"
            yield Verdict(budget, f"{sign}{format_value(abs(more), unit)}", more <= budget.limit)
        else:
            ratio = result.ratio(ours, budget.peer, budget.metric, budget.size)
            if ratio is None:
                yield Verdict(budget, f"{budget.peer} not measured", None)
            elif budget.kind == "within":
                yield Verdict(budget, f"{ratio:.2f} times", ratio <= budget.limit)
            else:
                yield Verdict(budget, f"{1 / ratio:.1f} times faster", 1 / ratio >= budget.limit)


def markdown(benchmark: Benchmark, result: Result) -> str:
    """Everything about a result."""
    lines = [f"### {benchmark.title}", ""]
    lines += [
        f"`uv run python -m benchmarks {benchmark.name}`; {result.rounds} rounds; {machine_line(result.machine)}.",
        "",
    ]
    shown = _budget_table(benchmark, result)
    if shown:
        lines += [*shown, ""]
    for metric, unit in benchmark.units.items():
        table = _metric_table(benchmark, result, metric, unit)
        if table:
            lines += [*table, ""]
    slopes = _slope_table(benchmark, result)
    if slopes:
        lines += [*slopes, ""]
    for name, reason in result.missing.items():
        lines += [f"Not measured (fully): {name}: {reason}", ""]
    versions = "; ".join(
        f"{site}: {', '.join(f'{package} {number}' for package, number in packages.items())}"
        for site, packages in result.versions.items()
    )
    lines += [f"Versions: {versions}."]
    if benchmark.bound:
        lines += ["", f"What bounds it: {benchmark.bound}"]
    return "\n".join(lines) + "\n"


def _budget_table(benchmark: Benchmark, result: Result) -> list[str]:
    rows = []
    for verdict in verdicts(benchmark, result):
        met = {True: "met", False: "**missed**", None: "open"}[verdict.met]
        rows.append([verdict.budget.text, verdict.figure, met])
    return _table(["budget", "measured", ""], rows) if rows else []


def _metric_table(benchmark: Benchmark, result: Result, metric: str, unit: str) -> list[str]:
    ours = benchmark.contenders[0].name
    rows = []
    for size in _sizes(result, metric):
        for contender in benchmark.contenders:
            series = result.find(contender.name, metric, size)
            if series is None:
                continue
            low, high = series.quartiles
            ratio = result.ratio(contender.name, ours, metric, size)
            rows.append(
                [
                    *[f"{value:,}" for value in size.values()],
                    contender.name,
                    format_value(series.median, unit),
                    f"{format_value(low, unit)} to {format_value(high, unit)}",
                    "" if ratio is None or contender.name == ours else f"{ratio:.2f}",
                ]
            )
    if not rows:
        return []
    names = [name.replace("_", " ") for name in _sizes(result, metric)[0]]
    return _table([*names, metric, "median", "middle half of the rounds", f"times {ours}"], rows)


def _slope_table(benchmark: Benchmark, result: Result) -> list[str]:
    rows = []
    for metric in benchmark.units:
        for contender in benchmark.contenders:
            slope = result.slope(contender.name, metric, benchmark.axis) if benchmark.axis else None
            if slope is not None:
                rows.append([metric, contender.name, f"{slope:.2f}"])
    if not rows:
        return []
    return _table(["metric", "contender", f"slope over {benchmark.axis.replace('_', ' ')} (log-log)"], rows)


def _sizes(result: Result, metric: str) -> list[Size]:
    found: list[Size] = []
    for series in result.series:
        if series.metric == metric and series.size not in found:
            found.append(series.size)
    return found


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return [line(header), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)]
