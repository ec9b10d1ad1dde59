"""``meta_info``: what holds for the whole batch, copied for each result and merged by declared policies.

``meta_info["metrics"]`` always keeps the metrics of all parts. Any other key follows its policy; without one, parts
must agree (``EQUAL``), and a key that only some parts have is kept.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from kapell.protocol.columns.equality import close

__all__ = [
    "METRICS",
    "MetaPolicy",
    "copy_meta",
    "merge_meta",
    "merge_metrics",
    "meta_policies",
    "register_meta_policy",
    "union_meta",
]

METRICS = "metrics"
_MAX_SHOWN = 80  # characters of a value in a message


class MetaPolicy(StrEnum):
    """How ``concat`` makes one value of the values that the parts have for a key."""

    EQUAL = "equal"
    """All parts agree (floats to 0.01 %, NaN with NaN), else an error that names key and values."""
    FIRST = "first"
    """The value of the first part that has the key."""
    SUM = "sum"
    MEAN = "mean"
    LIST = "list"
    """The values of the parts that have the key, in part order; a part's list adds its items."""
    PER_RANK = "per_rank"
    """One entry a part, None for a part without the key."""


_POLICIES: dict[str, MetaPolicy] = {}


def register_meta_policy(key: str, policy: MetaPolicy | str) -> None:
    """Declare for the whole program how a key of ``meta_info`` is merged."""
    policy = MetaPolicy(policy)
    if key == METRICS:
        raise ValueError("metrics are always kept from all parts; their policy cannot be changed")
    if _POLICIES.get(key, policy) is not policy:
        raise ValueError(f"meta_info key {key!r} has the policy {_POLICIES[key].value!r} already")
    _POLICIES[key] = policy


def meta_policies() -> dict[str, MetaPolicy]:
    """Give the declared policies."""
    return dict(_POLICIES)


def copy_meta(meta: Mapping[str, Any] | None) -> dict[str, Any]:
    """Copy the containers of ``meta_info`` at every depth and share what is in them.

    >>> meta = {"metrics": {"loss": [1.0]}}
    >>> copy_meta(meta)["metrics"]["loss"].append(2.0); meta
    {'metrics': {'loss': [1.0]}}
    """
    return {key: _copy_containers(value) for key, value in (meta or {}).items()}


def merge_metrics(parts: Iterable[Any]) -> dict[str, list[Any]]:
    """Collect the metrics of all parts: one list a name, in part order, whatever names each part has.

    A part is a dict, or a list of dicts; a value that is a list already (an earlier merge) adds its items.

    >>> merge_metrics([{"loss": 1}, [{"loss": 2}, {"kl": 3}], {"loss": [4, 5]}])
    {'loss': [1, 2, 4, 5], 'kl': [3]}
    """
    merged: dict[str, list[Any]] = {}
    for part in parts:
        for metrics in part if isinstance(part, list | tuple) else [part]:
            if metrics is None:
                continue
            if not isinstance(metrics, Mapping):
                raise TypeError(f"metrics are dicts of name to value, got {type(metrics).__name__}")
            for name, value in metrics.items():
                merged.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return merged


def merge_meta(
    parts: Sequence[Mapping[str, Any]], policies: Mapping[str, MetaPolicy | str] | None = None
) -> dict[str, Any]:
    """Merge the ``meta_info`` of parts that are joined; ``policies`` comes before what is registered."""
    declared = _POLICIES | {key: MetaPolicy(policy) for key, policy in (policies or {}).items()}
    keys = list(dict.fromkeys(key for part in parts for key in part))
    merged: dict[str, Any] = {}
    for key in keys:
        if key == METRICS:
            present = [part[key] for part in parts if part.get(key) is not None]
            if present:
                merged[key] = merge_metrics(present)
        else:
            merged[key] = _merge_key(key, parts, declared.get(key, MetaPolicy.EQUAL))
    return merged


def union_meta(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the ``meta_info`` of two batches with the same rows: common keys must agree, metrics add their names."""
    merged = copy_meta(left)
    for key, value in right.items():
        mine = merged.get(key)
        if key == METRICS and isinstance(mine, dict) and isinstance(value, Mapping):
            merged[key] = mine | _agreeing(f"{METRICS}.", mine, value)
        else:
            merged |= _agreeing("", merged, {key: value})
    return merged


def _agreeing(prefix: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in right.items():
        if key in left and not close(left[key], value):
            raise _conflict(prefix + key, left[key], value)
    return copy_meta({key: value for key, value in right.items() if key not in left})


def _merge_key(key: str, parts: Sequence[Mapping[str, Any]], policy: MetaPolicy) -> Any:
    if policy is MetaPolicy.PER_RANK:
        return [_copy_containers(part.get(key)) for part in parts]
    values = [_copy_containers(part[key]) for part in parts if key in part]
    if policy is MetaPolicy.LIST:
        return [item for value in values for item in (value if isinstance(value, list) else [value])]
    if policy is MetaPolicy.SUM or policy is MetaPolicy.MEAN:
        total = sum(values[1:], start=values[0])
        return total if policy is MetaPolicy.SUM else total / len(values)
    if policy is MetaPolicy.EQUAL:
        for value in values[1:]:
            if not close(values[0], value):
                raise _conflict(key, values[0], value)
    return values[0]


def _conflict(key: str, left: Any, right: Any) -> ValueError:
    shown = " and ".join(textwrap.shorten(repr(value), _MAX_SHOWN) for value in (left, right))
    return ValueError(
        f"Conflicting values for meta_info key '{key}': {shown}; make them agree or declare how the key merges "
        f"(policies={{{key!r}: 'first' | 'sum' | 'mean' | 'list' | 'per_rank'}} or register_meta_policy)"
    )


def _copy_containers(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copy_containers(entry) for key, entry in value.items()}
    if type(value) is list:
        return [_copy_containers(entry) for entry in value]
    return value
