"""Starting workers under Nvidia's profiler, by verl's options. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["profiled"]

_RANGES_PER_STEP = 6  # as in verl: the parts of a training step, when each is captured on its own


def profiled(
    options: Mapping[str, Any] | None, profile_steps: Sequence[int] | None, device_name: str
) -> dict[str, Any]:
    """Ray options of actors that start under ``nsys profile`` with ``options``; none when no steps are profiled.

    Where ``capture-range-end`` is None, as many ranges are captured as the steps can have. All workers
    of a group start so: which of them gets which rank follows from where they started.

    >>> profiled({"trace": "cuda", "capture-range-end": None}, [1, 2], "cuda")
    {'runtime_env': {'nsight': {'trace': 'cuda', 'capture-range-end': 'repeat-shutdown:12'}}}
    """
    if not options or not profile_steps or device_name != "cuda":
        return {}
    nsight = dict(options)
    if "capture-range-end" in nsight and nsight["capture-range-end"] is None:
        nsight["capture-range-end"] = f"repeat-shutdown:{_RANGES_PER_STEP * len(profile_steps)}"
    return {"runtime_env": {"nsight": nsight}}
