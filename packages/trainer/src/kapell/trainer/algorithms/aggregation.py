"""From per-token losses to one number, the same for every split into micro-batches and data-parallel ranks.

Each part divides by the counts of the whole mini-batch, so parts add up: the loss of a mini-batch is the sum over its
micro-batches of one rank, averaged over ranks (as data-parallel training averages gradients; hence `dp_size`).
"""
# B rows, T response tokens

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from kapell.trainer.algorithms.masked import as_mask, keep, masked_mean, masked_sum
from kapell.trainer.algorithms.metrics import Metric

__all__ = ["Aggregation", "BatchTotals", "LossResult", "aggregate", "aggregated_loss"]


class Aggregation(StrEnum):
    """How token losses become one loss; N valid tokens and S non-empty sequences of the whole mini-batch."""

    TOKEN_MEAN = "token-mean"
    """sum of all / N (DAPO, 2503.14476)"""
    TOKEN_SUM = "token-sum"
    """sum of all"""
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    """sum of all / S"""
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    """mean over sequences of their token mean (GRPO, 2402.03300)"""
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"
    """sum of all / S / scale, a constant (Dr.GRPO, 2503.20783)"""

    @classmethod
    def _missing_(cls, value: object) -> "Aggregation":
        raise ValueError(f"unknown loss aggregation {value!r}; known: {', '.join(cls)}")


@dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """What the whole mini-batch holds, over all its micro-batches and ranks."""

    num_tokens: int
    """valid tokens"""
    num_sequences: int
    """rows with at least one valid token"""
    dp_size: int = 1
    """data-parallel ranks over which gradients are averaged"""

    @classmethod
    def of(cls, mask_BT: Tensor) -> "BatchTotals":
        """The counts of one mask, for a single rank; `combined` joins ranks or micro-batches.

        >>> BatchTotals.of(torch.tensor([[1, 1], [1, 0], [0, 0]]))
        BatchTotals(num_tokens=3, num_sequences=2, dp_size=1)
        """
        lengths_B = as_mask(mask_BT).sum(-1)
        return cls(num_tokens=int(lengths_B.sum()), num_sequences=int((lengths_B > 0).sum()))

    @classmethod
    def combined(cls, parts: Iterable["BatchTotals"], *, dp_size: int) -> "BatchTotals":
        """The totals of all parts together, for training on `dp_size` ranks."""
        parts = list(parts)
        return cls(
            num_tokens=sum(part.num_tokens for part in parts),
            num_sequences=sum(part.num_sequences for part in parts),
            dp_size=dp_size,
        )


class LossResult(NamedTuple):
    """A loss to call `backward()` on, and the metrics of this part."""

    loss: Tensor
    metrics: dict[str, Metric]


def aggregate(
    losses_BT: Tensor, mask_BT: Tensor, mode: Aggregation | str, totals: BatchTotals, *, scale: float | None = None
) -> Tensor:
    """This part's share of the mini-batch loss, times `totals.dp_size`; 0 with zero gradient if nothing is valid.

    `scale` is the constant of `seq-mean-token-sum-norm`: the maximal response length. Without it the padded width T is
    taken, which is the same for all parts only if they are padded alike.
    """
    mode = Aggregation(mode)
    sequences = max(totals.num_sequences, 1)
    if mode is Aggregation.TOKEN_MEAN:
        loss = masked_sum(losses_BT, mask_BT) / max(totals.num_tokens, 1)
    elif mode is Aggregation.TOKEN_SUM:
        loss = masked_sum(losses_BT, mask_BT)
    elif mode is Aggregation.SEQ_MEAN_TOKEN_MEAN:
        loss = masked_mean(losses_BT, mask_BT, dim=-1).sum() / sequences
    else:
        loss = masked_sum(losses_BT, mask_BT) / sequences
        if mode is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
            loss = loss / (losses_BT.shape[-1] if scale is None else scale)
    return loss * totals.dp_size


def aggregated_loss(
    name: str,
    losses_BT: Tensor,
    mask_BT: Tensor,
    mode: Aggregation | str,
    totals: BatchTotals,
    *,
    scale: float | None = None,
    token_metrics: Mapping[str, Tensor] | None = None,
) -> LossResult:
    """`aggregate`, with the metric `name` = the loss of the mini-batch and the mean of each (B, T) token metric.

    The parts of the metric add up to the mini-batch loss over any split, without `dp_size`; mini-batches average.
    """
    mode = Aggregation(mode)
    loss = aggregate(losses_BT, mask_BT, mode, totals, scale=scale)
    sums = {key: keep(mask_BT, values_BT).detach().sum() for key, values_BT in (token_metrics or {}).items()}
    valid_BT = as_mask(mask_BT)
    # One transfer from the device for all numbers of this part.
    part, tokens, sequences, *amounts = torch.stack(
        [
            number.double()
            for number in (loss.detach() / totals.dp_size, valid_BT.sum(), valid_BT.any(-1).sum(), *sums.values())
        ]
    ).tolist()
    by_token = mode in (Aggregation.TOKEN_MEAN, Aggregation.TOKEN_SUM)
    whole = totals.num_tokens if by_token else totals.num_sequences
    share = (tokens if by_token else sequences) / max(whole, 1)
    metrics = {name: Metric.part_of_mean(part, weight=share)}
    for key, amount in zip(sums, amounts, strict=True):
        metrics[key] = Metric.part_of_mean(amount, weight=tokens)
    return LossResult(loss, metrics)
