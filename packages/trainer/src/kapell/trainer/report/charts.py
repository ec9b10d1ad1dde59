"""Line charts and stacked bars as SVG text, with colours from the page's style sheet."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from .run_data import Points

__all__ = ["Series", "line_chart", "stacked_bars", "ticks", "tidy"]

_WIDTH, _HEIGHT = 400, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 10, 26
_MAX_POINTS = 400  # per line; more are averaged, since no screen shows them
_MANY_POINTS = 60  # from here on a line is drawn faintly, under its moving average
_WINDOW = 20  # that average is over so many parts of the line, around each point, so that it does not lag


@dataclass(frozen=True)
class Series:
    """One line."""

    name: str
    """What the legend calls it."""
    points: Points
    """Its points."""
    color: int
    """Number of its colour, from 1."""
    dashed: bool = False
    """For the second of two runs."""


def tidy(value: float) -> str:
    """The number in a few characters.

    >>> [tidy(value) for value in (0.0, 0.00012, 0.1234, 12.3456, 1234.5, 5e6)]
    ['0', '0.00012', '0.123', '12.3', '1,234', '5e+06']
    """
    if value == 0:
        return "0"
    if 1000 <= abs(value) < 100_000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that cover ``low`` to ``high`` in about ``count`` steps.

    >>> ticks(0.0, 1.0), ticks(3, 17)
    ([0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 5.0, 10.0, 15.0, 20.0])
    """
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # equal but for rounding
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / count
    magnitude = 10 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    digits = 2 - math.floor(math.log10(step))  # the step has two at most
    return [round(number * step, digits) for number in range(first, last + 1)]


class _Axes:
    """Where a value lies on the picture."""

    def __init__(self, steps: Sequence[float], values: Sequence[float]) -> None:
        self.y_ticks = ticks(min(values), max(values))
        self.x_low, self.x_high = min(steps), max(max(steps), min(steps) + 1)
        self.x_ticks = [tick for tick in ticks(self.x_low, self.x_high, 5) if self.x_low <= tick <= self.x_high]

    def x(self, step: float) -> float:
        return _LEFT + (step - self.x_low) / (self.x_high - self.x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def svg(self) -> str:
        parts = []
        for tick in self.y_ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{tidy(tick)}</text>')
        for tick in self.x_ticks:
            x = f"{self.x(tick):.1f}"
            parts.append(f'<text class="tick" x="{x}" y="{_HEIGHT - 9}" text-anchor="middle">{tidy(tick)}</text>')
        return "".join(parts)


def line_chart(series: Sequence[Series], label: str) -> str:
    """The series over their steps."""
    drawn = [Series(line.name, _thinned(line.points), line.color, line.dashed) for line in series if line.points]
    axes = _Axes([x for line in drawn for x, _ in line.points], [y for line in drawn for _, y in line.points])
    shapes = "".join(_line(line, axes) for line in drawn)
    data = {
        "left": _LEFT,
        "right": _WIDTH - _RIGHT,
        "low": axes.x_low,
        "high": axes.x_high,
        "lines": [
            {
                "name": line.name,
                "color": line.color,
                "dashed": line.dashed,
                "points": [[x, float(f"{y:.6g}")] for x, y in line.points],
            }
            for line in drawn
        ],
    }
    return _svg(axes.svg() + shapes + '<line class="cursor"/>', label, json.dumps(data))


def _line(line: Series, axes: _Axes) -> str:
    style = f'class="line c{line.color}{" dashed" if line.dashed else ""}'
    places = [(axes.x(x), axes.y(y)) for x, y in line.points]
    if len(places) == 1:
        return f'<circle class="dot c{line.color}" cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="3"/>'
    raw = _path(places)
    if len(places) < _MANY_POINTS:
        dots = ""
        if len(places) <= 15:
            dots = "".join(f'<circle class="dot c{line.color}" cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>' for x, y in places)
        return f'<path {style}" d="{raw}"/>{dots}'
    smooth = [(axes.x(x), axes.y(y)) for x, y in _smoothed(line.points)]
    return f'<path {style} faint" d="{raw}"/><path {style}" d="{_path(smooth)}"/>'


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _smoothed(points: Points) -> Points:
    """Mean over a window around each point, smaller at the ends so that it stays centred."""
    half = max(len(points) // _WINDOW // 2, 1)
    smooth = []
    for place, (x, _) in enumerate(points):
        reach = min(half, place, len(points) - 1 - place)
        window = [y for _, y in points[place - reach : place + reach + 1]]
        smooth.append((x, sum(window) / len(window)))
    return smooth


def _thinned(points: Points) -> Points:
    size = -(-len(points) // _MAX_POINTS)
    bins = [points[start : start + size] for start in range(0, len(points), size)]
    return [(some[-1][0], sum(y for _, y in some) / len(some)) for some in bins]


def stacked_bars(
    steps: Sequence[float], parts: Mapping[str, Sequence[float]], colors: Mapping[str, int], label: str
) -> str:
    """For each step a bar of the parts on top of each other; many steps are averaged into fewer bars."""
    size = -(-len(steps) // 80)
    starts = range(0, len(steps), size)
    bars = {
        name: [sum(values[i : i + size]) / len(values[i : i + size]) for i in starts] for name, values in parts.items()
    }
    totals = [sum(column) for column in zip(*bars.values(), strict=True)]
    axes = _Axes([min(steps) - 0.5, max(steps) + 0.5], [0.0, max(totals)])
    width = (axes.x(1) - axes.x(0)) * size
    shapes = []
    for place, start in enumerate(starts):
        below = 0.0
        left = axes.x(steps[start] - 0.5)
        for name, values in bars.items():
            top, bottom = axes.y(below + values[place]), axes.y(below)
            below += values[place]
            title = f"<title>step {steps[start]:g}: {escape(name)} {tidy(values[place])} s</title>"
            shapes.append(
                f'<rect class="bar c{colors[name]}" x="{left:.2f}" y="{top:.2f}" width="{max(width * 0.9, 0.5):.2f}" '
                f'height="{max(bottom - top, 0):.2f}">{title}</rect>'
            )
    return _svg(axes.svg() + "".join(shapes), label)


def _svg(content: str, label: str, data: str = "") -> str:
    attribute = f' data-chart="{escape(data)}"' if data else ""
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}"{attribute}>{content}</svg>'
