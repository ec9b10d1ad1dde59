"""Statistics of the rows that answer the same prompt, told by id and never by position."""
# B rows, G groups

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kapell.trainer.algorithms.metrics import Metric

__all__ = ["Groups", "Uid", "group_rows"]

Uid = Sequence[Hashable] | Tensor | np.ndarray
"""The id of the prompt that each row answers, (B,)"""


@dataclass(frozen=True)
class Groups:
    """Which rows belong together. A row that takes no part (no valid token) is in its group but is never counted."""

    index: Tensor
    """group number of each row, (B,)"""
    counted: Tensor
    """whether the row takes part, (B,) bool"""
    num_groups: int

    def total(self, values_B: Tensor) -> Tensor:
        """Per row the sum of its group, (B, ...) -> (B, ...)."""
        counted = self.counted.view(-1, *[1] * (values_B.dim() - 1))
        kept_B = torch.where(counted, values_B, torch.zeros_like(values_B))
        return kept_B.new_zeros(self.num_groups, *kept_B.shape[1:]).index_add(0, self.index, kept_B)[self.index]

    def size(self) -> Tensor:
        """Per row the number of counted rows in its group, (B,)."""
        return self.total(self.counted.long())

    def mean(self, values_B: Tensor) -> Tensor:
        """Per row the mean of its group, (B,)."""
        return self.total(values_B) / self.size().clamp(min=1)

    def std(self, values_B: Tensor, *, unbiased: bool = True) -> Tensor:
        """Per row the standard deviation of its group, 0 for a group of one, (B,)."""
        squares_B = (values_B - self.mean(values_B)).square()
        return (self.total(squares_B) / (self.size() - int(unbiased)).clamp(min=1)).sqrt()

    def maximum(self, values_B: Tensor) -> Tensor:
        """Per row the largest value of its group, (B,)."""
        kept_B = torch.where(self.counted, values_B, torch.full_like(values_B, -torch.inf))
        lowest_G = values_B.new_full((self.num_groups,), -torch.inf)
        return lowest_G.scatter_reduce(0, self.index, kept_B, "amax")[self.index]

    def spread(self, values_B: Tensor) -> Tensor:
        """Per row whether its group has different values, (B,) bool; exact, unlike a tiny `std` or `x - mean`."""
        return self.maximum(values_B) > -self.maximum(-values_B)

    def informative(self) -> Tensor:
        """Per row whether it can be compared: it is counted, and so is another one of its group, (B,) bool."""
        return self.counted & (self.size() > 1)

    def metrics(self) -> dict[str, Metric]:
        """`adv/singleton_groups`: groups with one counted row, whose advantage is 0."""
        singletons = int((self.counted & (self.size() == 1)).sum())
        return {"adv/singleton_groups": Metric.sum(singletons)}


def group_rows(uid: Uid, counted: Tensor) -> Groups:
    """Group rows by id (int, str, UUID, ...); rows where `counted` is false stay out of all statistics."""
    ids = uid.tolist() if isinstance(uid, Tensor | np.ndarray) else list(uid)
    if len(ids) != len(counted):
        raise ValueError(f"{len(ids)} group ids for {len(counted)} rows")
    numbers: dict[Hashable, int] = {}
    for row, key in enumerate(ids):
        if key is None:
            raise ValueError(f"row {row} has no group id; every row needs the id of its prompt in the column 'uid'")
        numbers.setdefault(key, len(numbers))
    index = torch.tensor([numbers[key] for key in ids], dtype=torch.long, device=counted.device)
    return Groups(index, counted, len(numbers))
