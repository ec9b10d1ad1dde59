"""Checks of values that configuration classes share."""

from __future__ import annotations

__all__ = ["require_not_negative", "require_positive", "require_range"]


def require_positive(config: object, *names: str) -> None:
    """Raise ``ValueError`` for a field that is given and not above 0."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}")


def require_not_negative(config: object, *names: str) -> None:
    """Raise ``ValueError`` for a field that is given and below 0."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value}")


def require_range(config: object, low: float, high: float, *names: str) -> None:
    """Raise ``ValueError`` for a field outside ``[low, high]``."""
    for name in names:
        value = getattr(config, name)
        if not low <= value <= high:
            raise ValueError(f"{name} must lie between {low:g} and {high:g}, got {value}")
