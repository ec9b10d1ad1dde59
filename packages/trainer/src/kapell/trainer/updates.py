"""In what portions a batch is learned from, and how the KL penalty's weight follows the divergence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .config import KLControlConfig

__all__ = ["AdaptiveKL", "UpdatePlan", "mini_batches"]


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """How often and in what portions a batch is learned from."""

    epochs: int = 1
    """Passes over the batch."""
    prompts_per_mini_batch: int
    """Prompts, with all their samples, per optimizer step."""
    micro_batch_size: int | None = None
    """Rows per forward and backward pass on each worker."""
    shuffle: bool = True
    """Deal prompts anew each epoch."""


def mini_batches(uid: np.ndarray, plan: UpdatePlan, *, seed: tuple[int, ...]) -> Iterator[list[int]]:
    """Row numbers of each mini-batch, over all epochs; the rows of a prompt stay together.

    >>> list(mini_batches(np.array(["a", "a", "b"]), UpdatePlan(prompts_per_mini_batch=1, shuffle=False), seed=(1,)))
    [[0, 1], [2]]
    """
    rows_of: dict[Any, list[int]] = {}
    for row, key in enumerate(uid):
        rows_of.setdefault(key, []).append(row)
    groups = list(rows_of.values())
    for epoch in range(plan.epochs):
        order = np.arange(len(groups))
        if plan.shuffle:
            order = np.random.default_rng((*seed, epoch)).permutation(order)
        for start in range(0, len(order), plan.prompts_per_mini_batch):
            chosen = order[start : start + plan.prompts_per_mini_batch]
            yield [row for index in chosen for row in groups[index]]


class AdaptiveKL:
    """The weight of the KL penalty in the reward: fixed, or steered towards a target (Ziegler et al., 1909.08593)."""

    def __init__(self, config: KLControlConfig) -> None:
        self._config = config
        self.coefficient = config.kl_coef

    def update(self, current_kl: float, num_rows: int) -> None:
        """Move the weight after a batch of ``num_rows`` rows with that KL divergence."""
        if self._config.type == "adaptive":
            error = min(max(current_kl / self._config.target_kl - 1.0, -0.2), 0.2)
            self.coefficient *= 1.0 + error * num_rows / self._config.horizon
