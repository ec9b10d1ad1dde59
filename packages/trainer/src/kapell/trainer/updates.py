"""In what portions a batch is learned from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .micro_batches import MicroBatches

__all__ = ["UpdatePlan", "mini_batches"]


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """How often and in what portions a batch is learned from."""

    epochs: int = 1
    """Passes over the batch."""
    prompts_per_mini_batch: int
    """Prompts, with all their samples, per optimizer step."""
    micro_batches: MicroBatches = field(default_factory=MicroBatches)
    """What goes through the model at once, on each worker."""
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
