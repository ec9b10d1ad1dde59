"""In what portions a batch is learned from, and the calls that do it."""

# B rows, T response tokens

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kapell.decorators import PerWorker
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
    target_kl: float | None = None
    """Make no further pass once the last mini-batch of one has a larger ``approx_kl`` than this. None: make all."""
    whiten_advantages: bool = False
    """Scale the advantages of each mini-batch to mean 0 and unit spread over the tokens that count in its loss."""


def mini_batches(
    uid: np.ndarray, plan: UpdatePlan, *, seed: tuple[int, ...], epochs: Iterable[int] | None = None
) -> Iterator[list[int]]:
    """Row numbers of each mini-batch, over these of the plan's epochs, or all; the rows of a prompt stay together.

    >>> list(mini_batches(np.array(["a", "a", "b"]), UpdatePlan(prompts_per_mini_batch=1, shuffle=False), seed=(1,)))
    [[0, 1], [2]]
    """
    rows_of: dict[Any, list[int]] = {}
    for row, key in enumerate(uid):
        rows_of.setdefault(key, []).append(row)
    groups = list(rows_of.values())
    for epoch in range(plan.epochs) if epochs is None else epochs:
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
    """Move a group's model over all mini-batches of a batch; the batch with the metrics of it.

    With ``plan.target_kl`` a pass may be the last, and ``{role}/ppo_epochs`` is how many there were.
    """
    move = _at_once if group.concurrent else _one_by_one
    options = {"objective": objective, "micro_batches": plan.micro_batches}
    parts: list[Mapping[str, Metric]] = []
    epochs = range(plan.epochs)
    for some in [epochs] if plan.target_kl is None else [[epoch] for epoch in epochs]:
        dealt = _dealt(batch, objective, plan, ranks=group.world_size, seed=seed, epochs=some)
        last: list[Mapping[str, Metric]] = []
        for reports in move(group, dealt, **options):
            last = [metrics for metrics, _ in reports]
            moved = {f"{role}/{name}": Metric.mean(value, weight=1) for name, value in reports[0][1].items()}
            parts += [*last, moved]
        if plan.target_kl is not None:
            parts.append({f"{role}/ppo_epochs": Metric.sum(1)})
            if last and merge_metrics(last)[f"{role}/approx_kl"].value > plan.target_kl:
                break
    return add_metrics(batch, merge_metrics(parts))


_Reports = Iterable[Sequence[tuple[Mapping[str, Metric], Mapping[str, float]]]]  # by mini-batch, then by rank


def _at_once(group: WorkerGroup, dealt: Iterable[tuple[DataProto, BatchTotals]], **options: Any) -> _Reports:
    """One call for all mini-batches: ranks average their gradients within it, without the controller."""
    dealt = list(dealt)
    if not dealt:
        return []
    minis, totals = zip(*dealt, strict=True)
    shares = list(zip(*(mini.chunk(group.world_size) for mini in minis), strict=True))
    sizes = [[len(part) for part in share] for share in shares]
    batches = [DataProto.concat(share) for share in shares]
    return zip(*group.update(PerWorker(batches), PerWorker(sizes), totals, **options), strict=True)


def _one_by_one(group: WorkerGroup, dealt: Iterable[tuple[DataProto, BatchTotals]], **options: Any) -> _Reports:
    """Calls of which each is over on one rank before the next rank begins, as serial workers need it."""
    for mini, totals in dealt:
        metrics = group.forward_backward(mini, totals=totals, **options)
        moved = group.optimizer_step()
        yield [(of_rank, moved) for of_rank in metrics]


def _dealt(
    batch: DataProto,
    objective: PolicyObjective | ValueObjective,
    plan: UpdatePlan,
    *,
    ranks: int,
    seed: tuple[int, ...],
    epochs: Iterable[int],
) -> Iterator[tuple[DataProto, BatchTotals]]:
    """Each mini-batch with its totals, in the order in which ``ranks`` workers take a piece each."""
    optional = [name for name in objective.optional_columns if name in batch.columns]
    needed = batch.select(batch_keys=[*objective.columns, *optional], non_tensor_batch_keys=[])
    sizes = RowSizes.of(batch) if plan.balance else None
    all_masks_BT = batch.column("loss_mask" if "loss_mask" in optional else "response_mask")
    for rows in mini_batches(batch.non_tensor_batch["uid"], plan, seed=seed, epochs=epochs):
        order = torch.as_tensor(rows if sizes is None else sizes.balanced(rows, ranks))
        mini, mask_BT = needed.select_idxs(order), all_masks_BT[order]
        if plan.whiten_advantages:
            mini = _with_white_advantages(mini, mask_BT)
        yield mini, replace(BatchTotals.of(mask_BT), dp_size=ranks)


def _with_white_advantages(batch: DataProto, mask_BT: torch.Tensor) -> DataProto:
    white_BT = masked_whiten(batch.column("advantages"), mask_BT)
    others = [name for name in batch.columns if name != "advantages"]
    return batch.select(batch_keys=others).union(DataProto.from_dict(tensors={"advantages": white_BT}))
