"""Reductions of results: numbers, dicts of numbers, and metrics that say themselves how they are reduced."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kapell.decorators.modes import Reduction

__all__ = ["Metric", "reduce_outputs"]


@dataclass(frozen=True)
class Metric:
    """A number that knows how it is joined with its like from other ranks, whatever the method declares.

    >>> reduce_outputs("update", (0, 1), [{"loss": Metric(1.0, weight=3)}, {"loss": Metric(2.0, weight=1)}],
    ...                Reduction.MEAN)
    {'loss': 1.25}
    """

    value: Any
    """A number, or a tensor or array of numbers."""
    reduction: Reduction | str = Reduction.MEAN
    """How to join: mean, sum, max, min, first or list."""
    weight: float | None = None
    """Weight in a mean, such as the number of tokens; None for the rank's rows."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reduction", Reduction(self.reduction))
        if self.reduction in (Reduction.CONCAT, Reduction.DICT_OF_LISTS):
            raise ValueError(f"a metric is reduced by mean, sum, max, min, first or list, not {self.reduction}")
        if self.weight is not None and not self.weight >= 0:
            raise ValueError(f"the weight of a metric cannot be negative, got {self.weight}")


def reduce_outputs(
    method: str, ranks: Sequence[int], outputs: list[Any], reduction: Reduction, rows: Sequence[int] = ()
) -> Any:
    """One result from one a rank. `rows` weigh a mean: a rank without rows, or with padding only, counts in no
    mean, sum, max or min; a mean of no rows at all is NaN.

    Dicts are reduced key by key over the ranks that have the key; a `Metric` in them goes by its own reduction.

    >>> reduce_outputs("update", (0, 1), [{"loss": 1.0}, {"loss": 4.0}], Reduction.MEAN, rows=(2, 1))
    {'loss': 2.0}
    """
    if reduction is Reduction.LIST:
        return outputs
    if reduction is Reduction.FIRST:
        return outputs[0]
    weights = [float(count) for count in rows] if rows else [1.0] * len(outputs)
    entries = list(zip(ranks, outputs, weights, strict=True))
    if any(weights) and reduction is not Reduction.DICT_OF_LISTS:
        entries = [entry for entry in entries if entry[2] > 0]
    if reduction is Reduction.DICT_OF_LISTS:
        return _dict_of_lists(method, entries)
    return _reduce(method, "result", entries, reduction)


_Entry = tuple[int, Any, float]


def _reduce(method: str, name: str, entries: list[_Entry], reduction: Reduction) -> Any:
    if all(isinstance(value, dict) for _, value, _ in entries):
        keys = dict.fromkeys(key for _, value, _ in entries for key in value)
        return {key: _reduce(method, repr(key), _at(key, entries), reduction) for key in keys}
    own = {value.reduction for _, value, _ in entries if isinstance(value, Metric)}
    if len(own) > 1 or (own and not all(isinstance(value, Metric) for _, value, _ in entries)):
        raise TypeError(f"{method}: {name} is not the same kind of metric on all ranks: {_types(entries)}")
    if own:
        reduction = Reduction(own.pop())
        entries = [
            (rank, metric.value, weight if metric.weight is None else metric.weight) for rank, metric, weight in entries
        ]
    _check_numbers(method, name, entries, reduction)
    return _REDUCTIONS[reduction]([value for _, value, _ in entries], [weight for _, _, weight in entries])


def _at(key: Any, entries: list[_Entry]) -> list[_Entry]:
    return [(rank, value[key], weight) for rank, value, weight in entries if key in value]


def _dict_of_lists(method: str, entries: list[_Entry]) -> dict[Any, list[Any]]:
    if not all(isinstance(value, dict) for _, value, _ in entries):
        raise TypeError(f"{method}: collect='dict_of_lists' needs a dict from every rank: {_types(entries)}")
    joined: dict[Any, list[Any]] = {}
    for _, value, _ in entries:
        for key, item in value.items():
            joined.setdefault(key, []).append(item.value if isinstance(item, Metric) else item)
    return joined


def _check_numbers(method: str, name: str, entries: list[_Entry], reduction: Reduction) -> None:
    if reduction in (Reduction.FIRST, Reduction.LIST):
        return
    for rank, value, _ in entries:
        if isinstance(value, str | bytes | dict | list | tuple) or not hasattr(type(value), "__add__"):
            raise TypeError(
                f"{method}: {name} of rank {rank} is {type(value).__name__}, which has no {reduction.value}; "
                f"it came as {_types(entries)}"
            )


def _mean(values: list[Any], weights: list[float]) -> Any:
    # A value without weight may be NaN (the mean of nothing), and NaN * 0 is NaN: leave it out.
    counted = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight > 0]
    if not counted:
        return math.nan
    return sum(value * weight for value, weight in counted) / sum(weight for _, weight in counted)


def _sum(values: list[Any], weights: list[float]) -> Any:
    return sum(values[1:], start=values[0])


def _extreme(pick: Callable[..., Any], name: str) -> Callable[[list[Any], list[float]], Any]:
    def reduce(values: list[Any], weights: list[float]) -> Any:
        if getattr(values[0], "ndim", 0):
            raise TypeError(f"{name} joins numbers, got an array of shape {tuple(values[0].shape)}")
        return pick(values)

    return reduce


_REDUCTIONS: dict[Reduction, Callable[[list[Any], list[float]], Any]] = {
    Reduction.MEAN: _mean,
    Reduction.SUM: _sum,
    Reduction.MAX: _extreme(max, "max"),
    Reduction.MIN: _extreme(min, "min"),
    Reduction.FIRST: lambda values, weights: values[0],
    Reduction.LIST: lambda values, weights: values,
}


def _types(entries: list[_Entry]) -> str:
    return ", ".join(f"rank {rank}: {type(value).__name__}" for rank, value, _ in entries)
