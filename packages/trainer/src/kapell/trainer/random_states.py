"""The states of this process's random number generators: Python's, NumPy's, and PyTorch's on every device."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["random_states", "seed_generators", "set_random_states"]


def seed_generators(seed: int) -> None:
    """Begin all of them at a place that follows from the seed."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_states() -> dict[str, Any]:
    """All states, in a form that `kapell.trainer.state_files` writes."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Continue from what `random_states` returned; devices that are not here any more are left out."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    devices = states.get("cuda", [])
    for index, state in enumerate(devices[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, index)
