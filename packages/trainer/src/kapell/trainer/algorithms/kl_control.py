"""The coefficient of the KL penalty: fixed, or steered to a target."""

from dataclasses import dataclass
from typing import Protocol

__all__ = ["AdaptiveKLController", "FixedKLController", "KLController", "adapted_kl_coefficient"]

_MAX_RELATIVE_ERROR = 0.2  # 1909.08593, sec. 2.2: one batch moves the coefficient by a bounded factor


def adapted_kl_coefficient(beta: float, *, current: float, target: float, horizon: float, num_rows: int) -> float:
    """Beta (1 + clip(current/target - 1, -0.2, 0.2) n/horizon) (Ziegler et al., 1909.08593, sec. 2.2).

    >>> round(adapted_kl_coefficient(0.2, current=0.05, target=0.1, horizon=10000, num_rows=256), 6)
    0.198976
    """
    error = min(max(current / target - 1, -_MAX_RELATIVE_ERROR), _MAX_RELATIVE_ERROR)
    return beta * (1 + error * num_rows / horizon)


class KLController(Protocol):
    """What the loop needs of a controller; `beta` is also its whole state, to be saved with a checkpoint."""

    beta: float

    def update(self, *, current: float, num_rows: int) -> None:
        """Take in the KL of one batch."""
        ...


@dataclass
class FixedKLController:
    """Keeps its coefficient."""

    beta: float
    """the coefficient"""

    def update(self, *, current: float, num_rows: int) -> None:
        """Do nothing."""


@dataclass
class AdaptiveKLController:
    """Moves its coefficient so that the KL comes to the target."""

    beta: float
    """the coefficient now"""
    target: float
    """the KL per token to keep"""
    horizon: float
    """rows over which an error is worked off"""

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(f"target and horizon must be positive, got {self.target} and {self.horizon}")

    def update(self, *, current: float, num_rows: int) -> None:
        """Change `beta` after a batch of `num_rows` rows with that KL."""
        self.beta = adapted_kl_coefficient(
            self.beta, current=current, target=self.target, horizon=self.horizon, num_rows=num_rows
        )
