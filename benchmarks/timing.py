"""Clocks for contenders. Standard library only: peers load it too."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["seconds_once", "seconds_per_call"]


def seconds_once(call: Callable[[], object]) -> float:
    """Wall-clock seconds of one call; what it returns is freed afterwards, off the clock."""
    began = time.perf_counter()
    kept = call()
    seconds = time.perf_counter() - began
    del kept
    return seconds


def seconds_per_call(call: Callable[[], object], *, at_least: float = 0.05) -> float:
    """Mean seconds of a call, repeated until ``at_least`` seconds are over."""
    count = 0
    began = now = time.perf_counter()
    while now - began < at_least:
        call()
        count += 1
        now = time.perf_counter()
    return (now - began) / count
