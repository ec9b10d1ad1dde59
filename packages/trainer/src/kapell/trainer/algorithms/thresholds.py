"""Thresholds as the config writes them: a number, or "low_high"."""

__all__ = ["parse_threshold"]


def parse_threshold(threshold: float | str) -> tuple[float | None, float]:
    """(low or None, high) of a number or of "low_high"; both positive, low not above high.

    >>> parse_threshold(2.0), parse_threshold("0.5_2")
    ((None, 2.0), (0.5, 2.0))
    """
    parts = str(threshold).split("_")  # before float(), which would read "1_2" as 12
    try:
        *low, high = (float(part) for part in parts)
    except ValueError:
        raise ValueError(f"a threshold is a number or 'low_high', got {threshold!r}") from None
    if len(low) > 1 or not high > 0 or (low and not 0 < low[0] <= high):
        raise ValueError(f"a threshold is a positive number or 'low_high' with 0 < low <= high, got {threshold!r}")
    return (low[0] if low else None), high
