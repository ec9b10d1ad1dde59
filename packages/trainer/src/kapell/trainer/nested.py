"""Nested values of a configuration: as plain containers, and under dotted keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["dotted", "plain"]


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested values under dotted keys; an empty mapping is a leaf.

    >>> dict(dotted({"data": {"seed": 1}, "logger": []}))
    {'data.seed': 1, 'logger': []}
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def plain(value: Any) -> Any:
    """Mappings as dicts and sequences as lists, as they come back from YAML."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
