"""In what portions a batch is learned from, and the calls that do it."""

# B rows, T response tokens

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kapell.protocol import DataProto
from kapell.workergroup import WorkerGroup

from .algorithms import BatchTotals, Metric, masked_whiten, merge_metrics
from .balance import RowSizes
from .metrics import add_metrics
from .micro_batches import MicroBatches
from .objectives import PolicyObjective, ValueObjective

__all__ = ["UpdatePlan", "learn", "mini_batches"]


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
    balance: bool = True
    """Give each worker rows with as many tokens in all as the others."""
    whiten_advantages: bool = False
    """Scale the advantages of each mini-batch to mean 0 and unit spread over the tokens that count in its loss."""


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


def learn(
    group: WorkerGroup,
    batch: DataProto,
    objective: PolicyObjective | ValueObjective,
    plan: UpdatePlan,
    *,
    role: str,
    seed: tuple[int, ...],
) -> DataProto:
    """Move a group's model over all mini-batches of a batch; the batch with the metrics of it."""
    optional = [name for name in objective.optional_columns if name in batch.columns]
    needed = batch.select(batch_keys=[*objective.columns, *optional], non_tensor_batch_keys=[])
    # Every call is sent before the first result is read, so that workers never wait for the controller.
    calls = []
    sizes = RowSizes.of(batch) if plan.balance else None
    all_masks_BT = batch.column("loss_mask" if "loss_mask" in optional else "response_mask")
    for rows in mini_batches(batch.non_tensor_batch["uid"], plan, seed=seed):
        order = torch.as_tensor(rows if sizes is None else sizes.balanced(rows, group.world_size))
        mini, mask_BT = needed.select_idxs(order), all_masks_BT[order]
        if plan.whiten_advantages:
            mini = _with_white_advantages(mini, mask_BT)
        totals = replace(BatchTotals.of(mask_BT), dp_size=group.world_size)
        gradients = group.forward_backward.options(blocking=False)(
            mini, objective=objective, totals=totals, micro_batches=plan.micro_batches
        )
        calls.append((gradients, group.optimizer_step.options(blocking=False)()))
    parts: list[Mapping[str, Metric]] = []
    for gradients, moved in calls:
        parts += gradients.get()
        parts.append({f"{role}/{name}": Metric.mean(value, weight=1) for name, value in moved.get().items()})
    return add_metrics(batch, merge_metrics(parts))


def _with_white_advantages(batch: DataProto, mask_BT: torch.Tensor) -> DataProto:
    white_BT = masked_whiten(batch.column("advantages"), mask_BT)
    others = [name for name in batch.columns if name != "advantages"]
    return batch.select(batch_keys=others).union(DataProto.from_dict(tensors={"advantages": white_BT}))
