"""What a result depends on: processor, memory, kernel, versions, and how busy the machine was."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

__all__ = ["describe_machine", "machine_line"]


def describe_machine() -> dict[str, Any]:
    """Facts about this machine, without its name."""
    model = ""
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = 0
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemTotal"):
            memory = int(line.split()[1]) * 1024
    return {
        "cpu": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def machine_line(machine: dict[str, Any]) -> str:
    """One line for people; ``load`` is the number of runnable processes when the benchmark began."""
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, {machine['system']}, "
        f"Python {machine['python']}, load {machine['load']} at the start, {machine['time']}"
    )


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.is_file() else []
