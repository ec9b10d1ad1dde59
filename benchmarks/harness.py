"""A benchmark: contenders measured in turn on the same sizes, and what its figures are held to."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .machine import describe_machine
from .servers import Server, ServerError
from .sites import OWN, OWN_VERSIONS, SITES, SiteError, python_of

__all__ = ["Benchmark", "Budget", "Contender", "Result", "Series", "Size", "run_benchmark"]

Size = Mapping[str, int]
_START_SECONDS = 240.0  # eight workers that import torch and more, two at a time
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Contender:
    """One way of doing it."""

    name: str
    """As tables show it."""
    target: str
    """``module:Class`` in `benchmarks.contenders`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class."""
    site: str = OWN
    """The environment that it runs in."""
    max_size: int | None = None
    """Largest value of the axis at which it takes part, where more would take minutes."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a figure is held to."""

    text: str
    """As design.md section 8 has it."""
    metric: str
    """Which metric."""
    size: Size
    """At which size."""
    ours: str = ""
    """Whose figure; the benchmark's first contender when empty."""
    kind: Literal["absolute", "within", "faster", "more"]
    """``absolute``: at most ``limit``. ``within``: at most ``limit`` times ``peer``. ``more``: at most ``peer`` plus
    ``limit``. ``faster``: ``peer`` takes at least ``limit`` times as much."""
    limit: float
    """How much."""
    peer: str = ""
    """Beside whom."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Contenders, sizes, and how to read the figures."""

    name: str
    """On the command line."""
    title: str
    """For people."""
    contenders: Sequence[Contender]
    """Ours first; ratios are to its figures."""
    sizes: Sequence[Size]
    """From small to large."""
    quick_sizes: Sequence[Size]
    """For a try of a few seconds."""
    units: Mapping[str, str]
    """Unit of each metric: ``s``, ``B``, ``tokens/s`` or another."""
    axis: str
    """The part of the size that a scaling plot shows."""
    rounds: int = 9
    """Measured rounds, after ``warmups``."""
    warmups: int = 2
    """Rounds that are not counted."""
    budgets: Sequence[Budget] = ()
    """What the figures are held to."""
    uses_ray: bool = False
    """Whether Ray sessions are started."""
    bound: str = ""
    """What bounds the figures."""


@dataclass
class Series:
    """The rounds of one contender at one size."""

    contender: str
    size: dict[str, int]
    metric: str
    values: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.values) < 2:
            return self.values[0], self.values[0]
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high


@dataclass
class Result:
    """What one run of a benchmark found."""

    benchmark: str
    machine: dict[str, Any]
    versions: dict[str, dict[str, str]]
    rounds: int
    quick: bool
    series: list[Series] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Contenders that could not be measured, fully or in part, and why."""
    seconds: float = 0.0

    def find(self, contender: str, metric: str, size: Size) -> Series | None:
        for series in self.series:
            if (series.contender, series.metric) == (contender, metric) and series.size == dict(size):
                return series
        return None

    def ratio(self, of: str, to: str, metric: str, size: Size) -> float | None:
        """Median over the rounds of one contender's value divided by the other's in the same round."""
        first, second = self.find(of, metric, size), self.find(to, metric, size)
        if first is None or second is None:
            return None
        # Rounds alternate, so that a slow moment of the machine falls on both sides of a pair.
        pairs = [a / b for a, b in zip(first.values, second.values, strict=False) if b]
        return statistics.median(pairs) if pairs else None

    def slope(self, contender: str, metric: str, axis: str) -> float | None:
        """Slope of the medians over ``axis`` in a log-log plot, by least squares; None for fewer than three sizes."""
        points = [
            (math.log(series.size[axis]), math.log(series.median))
            for series in self.series
            if (series.contender, series.metric) == (contender, metric) and series.median > 0 and series.size.get(axis)
        ]
        if len({x for x, _ in points}) < 3:
            return None
        slope, _ = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
        return slope


def run_benchmark(
    benchmark: Benchmark, *, quick: bool, say: Callable[[str], None], rounds: int | None = None
) -> Result:
    """Measure all contenders. One that fails is left out from then on, and named in ``missing``."""
    result = Result(
        benchmark=benchmark.name,
        machine=describe_machine(),
        versions={},
        rounds=rounds or (3 if quick else benchmark.rounds),
        quick=quick,
    )
    began = time.perf_counter()
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        running: list[Contender] = []
        for contender in benchmark.contenders:
            try:
                if contender.site not in servers:
                    say(f"starting {contender.site}")
                    log = RESULTS / "logs" / f"{benchmark.name}.{contender.site}.log"
                    server = Server(python_of(contender.site), log)
                    stack.callback(server.close)
                    servers[contender.site] = server
                    packages = OWN_VERSIONS if contender.site == OWN else SITES[contender.site].versions
                    result.versions[contender.site] = server.ask("versions", packages=list(packages))
                servers[contender.site].ask(
                    "open",
                    timeout=_START_SECONDS,
                    name=contender.name,
                    target=contender.target,
                    options=dict(contender.options),
                )
                running.append(contender)
            except (ServerError, SiteError) as error:
                result.missing[contender.name] = str(error)
        for size in benchmark.quick_sizes if quick else benchmark.sizes:
            say(_size_text(size))
            for contender in [contender for contender in running if _outgrown(contender, benchmark, size)]:
                running.remove(contender)
                _close(contender, servers, result)
                if contender.site not in {other.site for other in running}:
                    servers.pop(contender.site).close()  # gives its memory back to those that go on
            _measure_size(benchmark, size, running, servers, result, warmups=1 if quick else benchmark.warmups)
        for contender in reversed(running):
            _close(contender, servers, result)
    result.seconds = time.perf_counter() - began
    return result


def _measure_size(
    benchmark: Benchmark,
    size: Size,
    running: list[Contender],
    servers: Mapping[str, Server],
    result: Result,
    *,
    warmups: int,
) -> None:
    def try_ask(contender: Contender, do: str, **request: Any) -> Any:
        try:
            return servers[contender.site].ask(do, name=contender.name, **request)
        except ServerError as error:
            result.missing[contender.name] = f"at {_size_text(size)}: {error}"
            running.remove(contender)
            return None

    for contender in list(running):
        try_ask(contender, "prepare", timeout=_START_SECONDS, size=dict(size))
    for number in range(warmups + result.rounds):
        for contender in list(running):
            numbers = try_ask(contender, "round")
            if numbers is None or number < warmups:
                continue
            for metric, value in numbers.items():
                series = result.find(contender.name, metric, size)
                if series is None:
                    series = Series(contender.name, dict(size), metric, [])
                    result.series.append(series)
                series.values.append(value)


def _close(contender: Contender, servers: Mapping[str, Server], result: Result) -> None:
    try:
        servers[contender.site].ask("close", name=contender.name)
    except ServerError as error:
        result.missing.setdefault(contender.name, f"when closing: {error}")


def _outgrown(contender: Contender, benchmark: Benchmark, size: Size) -> bool:
    return contender.max_size is not None and size[benchmark.axis] > contender.max_size


def _size_text(size: Size) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in size.items()) or "one size"
