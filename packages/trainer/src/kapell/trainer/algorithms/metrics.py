"""Numbers that carry their weight and their reduction, so that parts combine to what the whole would have given.

A micro-batch, a rank and a mini-batch each report `Metric`s; `merge_metrics` joins them in any order or nesting.
Nothing is guessed from a name.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Metric", "Reduction", "merge_metrics", "metric_values"]


class Reduction(StrEnum):
    """How the parts of a metric combine."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True)
class Metric:
    """One part of a metric: `Metric.mean(0.8, weight=100)`, `Metric.sum(3)`, `Metric.max(7)`, `Metric.min(1)`.

    >>> (Metric.mean(0.8, weight=100) + Metric.mean(0.6, weight=200)).value
    0.6666666666666666
    """

    amount: float
    """For a mean the weighted sum of its values; else the sum, maximum or minimum so far."""
    weight: float
    """For a mean the sum of its weights; else how many parts there are. A part of weight 0 is ignored."""
    reduction: Reduction

    @classmethod
    def mean(cls, value: float, *, weight: float) -> "Metric":
        """A mean over `weight` things (tokens, rows, ...); with weight 0 its value, even NaN, is ignored."""
        if weight < 0:
            raise ValueError(f"the weight of a mean cannot be negative, got {weight}")
        return cls(float(value) * weight if weight else 0.0, float(weight), Reduction.MEAN)

    @classmethod
    def part_of_mean(cls, amount: float, *, weight: float) -> "Metric":
        """A mean of which the weighted sum is known: `amount / weight` once all parts are added."""
        return cls(float(amount) if weight else 0.0, float(weight), Reduction.MEAN)

    @classmethod
    def sum(cls, value: float) -> "Metric":
        """An amount that adds up over parts: a count, seconds."""
        return cls(float(value), 1.0, Reduction.SUM)

    @classmethod
    def max(cls, value: float) -> "Metric":
        """A maximum."""
        return cls(float(value), 1.0, Reduction.MAX)

    @classmethod
    def min(cls, value: float) -> "Metric":
        """A minimum."""
        return cls(float(value), 1.0, Reduction.MIN)

    @property
    def value(self) -> float:
        """The number to log; NaN if nothing was counted."""
        if not self.weight:
            return math.nan
        return self.amount / self.weight if self.reduction is Reduction.MEAN else self.amount

    def __add__(self, other: "Metric") -> "Metric":
        if self.reduction is not other.reduction:
            raise ValueError(f"cannot join a {self.reduction} with a {other.reduction}: {self} and {other}")
        if not self.weight or not other.weight:
            return self if self.weight else other
        join = _JOIN[self.reduction]
        return Metric(join(self.amount, other.amount), self.weight + other.weight, self.reduction)


_JOIN = {
    Reduction.MEAN: lambda left, right: left + right,
    Reduction.SUM: lambda left, right: left + right,
    Reduction.MAX: max,
    Reduction.MIN: min,
}


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Join the metrics of micro-batches, ranks or mini-batches by name; a name may be missing in some parts."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            try:
                merged[name] = merged[name] + metric if name in merged else metric
            except ValueError as error:
                raise ValueError(f"metric {name!r}: {error}") from error
    return merged


def metric_values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The numbers to log; a metric that counted nothing is left out."""
    return {name: metric.value for name, metric in metrics.items() if metric.weight}
