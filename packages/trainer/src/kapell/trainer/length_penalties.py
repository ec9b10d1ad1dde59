"""What training takes off the reward of a response for its length: too near the limit, or without an end."""

# B rows, T response tokens

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from .algorithms import Metric, missing_eos_penalty, on_last_token, response_lengths, soft_overlong_penalty

__all__ = ["LengthPenalties"]


@dataclass(frozen=True, kw_only=True)
class LengthPenalties:
    """The penalties of a run; by default there is none."""

    max_length: int
    """Longest response in tokens."""
    overlong_buffer: int | None = None
    """The last so many of these are penalised, each more than the one before (DAPO). None: none is."""
    overlong_factor: float = 1.0
    """The penalty of a response of ``max_length``."""
    missing_eos: float | None = None
    """The penalty of a response that goes to ``max_length`` without one of ``eos_token_ids``. None: there is none."""
    eos_token_ids: Collection[int] = ()
    """Tokens that end a response."""

    def __call__(self, responses_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, dict[str, Metric]]:
        """What is added to the rewards, ``(B, T)``: 0 or less on each response's last token. And its means."""
        lengths_B = response_lengths(mask_BT)
        penalties = {}
        if self.overlong_buffer is not None:
            penalties["overlong"] = soft_overlong_penalty(
                lengths_B, max_length=self.max_length, buffer=self.overlong_buffer, factor=self.overlong_factor
            )
        if self.missing_eos is not None:
            ids = torch.tensor(list(self.eos_token_ids), dtype=responses_BT.dtype)
            last_B = responses_BT.gather(1, (lengths_B - 1).clamp(min=0)[:, None])[:, 0]
            ended_B = (lengths_B < self.max_length) | torch.isin(last_B, ids)  # a shorter one ended, if by stop strings
            penalties["missing_eos"] = missing_eos_penalty(ended_B, penalty=self.missing_eos)
        total_B = sum(penalties.values(), torch.zeros(len(mask_BT)))
        metrics = {
            f"critic/{name}_penalty/mean": Metric.mean(penalty_B.mean().item(), weight=len(penalty_B))
            for name, penalty_B in penalties.items()
        }
        return on_last_token(total_B, mask_BT), metrics
