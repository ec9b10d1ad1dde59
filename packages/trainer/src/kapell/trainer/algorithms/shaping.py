"""Changes to rewards that depend on the length of a response."""
# B rows

import torch
from torch import Tensor

__all__ = ["missing_eos_penalty", "soft_overlong_penalty"]


def soft_overlong_penalty(lengths_B: Tensor, *, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """0 up to `max_length - buffer`, from there down to -factor at `max_length` (DAPO, 2503.14476, eq. 13), (B,).

    Without a buffer only what is longer than `max_length` is penalised.

    >>> soft_overlong_penalty(torch.tensor([15, 16, 20]), max_length=20, buffer=5)
    tensor([ 0.0000, -0.2000, -1.0000])
    """
    if not 0 <= buffer <= max_length:
        raise ValueError(f"the buffer must be between 0 and max_length={max_length}, got {buffer}")
    if buffer == 0:
        return torch.where(lengths_B > max_length, -factor, 0.0)
    excess_B = (lengths_B - (max_length - buffer)).clamp(min=0) / buffer
    return -factor * excess_B.clamp(max=1.0) + 0.0  # no negative zeros


def missing_eos_penalty(ended_B: Tensor, *, penalty: float) -> Tensor:
    """-penalty for each response that has no end token, else 0, (B,) (Huang et al., 2403.17031)."""
    return torch.where(ended_B != 0, 0.0, -penalty)
