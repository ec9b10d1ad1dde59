"""Deals the rows of a batch to workers so that each gets about as many tokens."""

# B rows, P prompt tokens

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kapell.decorators import karmarkar_karp
from kapell.protocol import DataProto

__all__ = ["balanced_call", "balanced_order"]

_PRICE_OF_PROMPTS = 1.1  # what keeping the rows of a prompt together may cost the busiest worker; sharing saves more


def balanced_order(batch: DataProto, num_workers: int) -> list[int]:
    """An order of the rows of which each worker takes a piece in turn, as large as the others' and as many tokens.

    Neighbours with one prompt, which a worker computes once, stay together where the balance allows it.
    """
    lengths = batch.column("attention_mask").sum(-1).tolist()
    parts = karmarkar_karp(lengths, num_workers, equal_size=True)
    groups = _rows_by_prompt(batch)
    if len({len(rows) for rows in groups}) == 1 and len(groups) < len(lengths) and len(groups) % num_workers == 0:
        tokens = [_most([rows], lengths) for rows in groups]
        whole = [
            [row for group in part for row in groups[group]]
            for part in karmarkar_karp(tokens, num_workers, equal_size=True)
        ]
        if _most(whole, lengths) <= _PRICE_OF_PROMPTS * _most(parts, lengths):
            parts = whole
    return [row for part in sorted(parts, key=len, reverse=True) for row in part]  # dispatch makes the first larger


def balanced_call(method: Callable[..., DataProto], batch: DataProto, *, num_workers: int, **options: Any) -> DataProto:
    """What a group's method gives for each row, in the batch's own order."""
    order = balanced_order(batch, num_workers)
    return method(batch.select_idxs(order), **options).select_idxs(np.argsort(order).tolist())


def _rows_by_prompt(batch: DataProto) -> list[list[int]]:
    """Runs of neighbouring rows with the same prompt."""
    num_tokens = batch.column("responses").shape[1]
    whole_BX = torch.cat([batch.column(name)[:, :-num_tokens] for name in ("input_ids", "attention_mask")], dim=1)
    _, sizes = torch.unique_consecutive(whole_BX, dim=0, return_counts=True)
    starts = np.cumsum([0, *sizes.tolist()])
    return [list(range(start, stop)) for start, stop in pairwise(starts)]


def _most(parts: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    """The tokens of the part with the most of them."""
    return max(sum(lengths[row] for row in rows) for rows in parts)
