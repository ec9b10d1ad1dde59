"""When a key has an effect: conditions that stand in its group's ``active_if``, beside the key.

A key in a condition is dotted from the top, or from the condition's own group where it starts with a dot. A group's
name as a key stands for all that is in it; a key without an entry is always active.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = [
    "AllOf",
    "AnyOf",
    "Condition",
    "Conditions",
    "Contains",
    "Given",
    "Lacks",
    "Needs",
    "OptionOf",
    "Surroundings",
    "Unset",
]


class Surroundings(Protocol):
    """What a condition may ask about the rest of the configuration, as seen from its group."""

    def full(self, key: str) -> str:
        """The key, dotted from the top."""
        ...

    def value(self, key: str) -> Any:
        """Its value."""
        ...

    def options(self, key: str) -> Collection[str]:
        """The options of the algorithm or optimizer that the key names."""
        ...


class Condition(Protocol):
    """Says why a key has no effect."""

    def unmet(self, around: Surroundings) -> str | None:
        """What would have to be, in words; None where the condition holds."""
        ...


Conditions = Mapping[str, Condition]
"""The conditions of a group, by the key or group within it."""


@dataclass(frozen=True)
class Needs:
    """Another key has one of these values."""

    key: str
    values: tuple[Any, ...] = (True,)

    def unmet(self, around: Surroundings) -> str | None:
        """The values that it needs."""
        if around.value(self.key) in self.values:
            return None
        return f"needs {around.full(self.key)}={' or '.join(_written(value) for value in self.values)}"


@dataclass(frozen=True)
class Lacks:
    """Another key has none of these values."""

    key: str
    values: tuple[Any, ...]

    def unmet(self, around: Surroundings) -> str | None:
        """The value that it has."""
        value = around.value(self.key)
        return f"{around.full(self.key)} is {_written(value)}" if value in self.values else None


@dataclass(frozen=True)
class Given:
    """Another key has a value: it is not null, empty or, for a number of steps, -1."""

    key: str

    def unmet(self, around: Surroundings) -> str | None:
        """The key that it needs."""
        value = around.value(self.key)
        return f"needs {around.full(self.key)}, which is {_written(value)}" if value in (None, -1, [], {}) else None


@dataclass(frozen=True)
class Unset:
    """Another key, which replaces this one, has no value."""

    key: str

    def unmet(self, around: Surroundings) -> str | None:
        """The key that takes its place."""
        value = around.value(self.key)
        if value in (None, [], {}):
            return None
        return f"{around.full(self.key)}={_written(value)} takes its place"


@dataclass(frozen=True)
class Contains:
    """Another key's list has one of these values."""

    key: str
    values: tuple[str, ...]

    def unmet(self, around: Surroundings) -> str | None:
        """The values of which it needs one."""
        found = set(self.values) & set(around.value(self.key))
        return None if found else f"needs {' or '.join(self.values)} in {around.full(self.key)}"


@dataclass(frozen=True)
class OptionOf:
    """The algorithm or optimizer that another key names has an option of this name."""

    key: str
    option: str

    def unmet(self, around: Surroundings) -> str | None:
        """The algorithm that lacks it."""
        if self.option in around.options(self.key):
            return None
        return f"{around.full(self.key)}={around.value(self.key)} has no {self.option}"


@dataclass(frozen=True)
class AnyOf:
    """One of several conditions holds."""

    conditions: tuple[Condition, ...]

    def unmet(self, around: Surroundings) -> str | None:
        """All that is unmet."""
        reasons = [condition.unmet(around) for condition in self.conditions]
        found = [reason for reason in reasons if reason is not None]
        return None if len(found) < len(reasons) else ", or ".join(found)


@dataclass(frozen=True)
class AllOf:
    """Several conditions hold."""

    conditions: tuple[Condition, ...]

    def unmet(self, around: Surroundings) -> str | None:
        """The first that is unmet."""
        return next((why for condition in self.conditions if (why := condition.unmet(around)) is not None), None)


def _written(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
