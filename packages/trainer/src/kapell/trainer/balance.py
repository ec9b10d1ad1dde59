"""Deals the rows of a batch to workers so that each gets about as many tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kapell.decorators import karmarkar_karp
from kapell.protocol import DataProto

__all__ = ["balanced_call", "balanced_order"]

_PRICE_OF_PROMPTS = 1.1  # times the mean: what the busiest worker may have with prompts kept whole; sharing saves more


def balanced_order(batch: DataProto, num_workers: int) -> list[int]:
    """An order of the rows of which each worker takes a piece in turn, as large as the others' and as many tokens.

    Neighbours with one prompt, which a worker computes once, stay together where the balance allows it.
    """
    lengths = batch.column("attention_mask").sum(-1).tolist()
    parts = _whole_prompts(batch, lengths, num_workers) or karmarkar_karp(lengths, num_workers, equal_size=True)
    return [row for part in sorted(parts, key=len, reverse=True) for row in part]  # dispatch makes the first larger


def balanced_call(method: Callable[..., DataProto], batch: DataProto, *, num_workers: int, **options: Any) -> DataProto:
    """What a group's method gives for each row, in the batch's own order."""
    order = balanced_order(batch, num_workers)
    return method(batch.select_idxs(order), **options).select_idxs(np.argsort(order).tolist())


def _whole_prompts(batch: DataProto, lengths: Sequence[int], num_workers: int) -> list[list[int]] | None:
    """Rows for each worker, with those of a prompt together; None where one of them would have too much."""
    groups = _rows_by_prompt(batch)
    if len(groups) == len(lengths) or len({len(rows) for rows in groups}) != 1 or len(groups) % num_workers:
        return None
    tokens = [sum(lengths[row] for row in rows) for rows in groups]
    dealt = karmarkar_karp(tokens, num_workers, equal_size=True)
    most = max(sum(tokens[group] for group in part) for part in dealt)
    if most > _PRICE_OF_PROMPTS * sum(tokens) / num_workers:
        return None
    return [[row for group in part for row in groups[group]] for part in dealt]


def _rows_by_prompt(batch: DataProto) -> list[list[int]]:
    """Runs of neighbouring rows with the same prompt."""
    num_tokens = batch.column("responses").shape[1]
    prompts = torch.cat([batch.column(name)[:, :-num_tokens] for name in ("input_ids", "attention_mask")], dim=1)
    _, sizes = torch.unique_consecutive(prompts, dim=0, return_counts=True)
    starts = np.cumsum([0, *sizes.tolist()])
    return [list(range(start, stop)) for start, stop in pairwise(starts)]
