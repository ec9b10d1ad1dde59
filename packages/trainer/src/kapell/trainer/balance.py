"""Deals the rows of a batch to workers so that each gets about as many tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kapell.decorators import karmarkar_karp
from kapell.protocol import DataProto

__all__ = ["balanced_call", "balanced_order"]


def balanced_order(batch: DataProto, num_workers: int) -> list[int]:
    """An order of the rows of which each worker takes a piece in turn, as large as the others' and as many tokens."""
    lengths = batch.column("attention_mask").sum(-1).tolist()
    parts = karmarkar_karp(lengths, num_workers, equal_size=True)
    return [row for part in sorted(parts, key=len, reverse=True) for row in part]  # dispatch makes the first larger


def balanced_call(method: Callable[..., DataProto], batch: DataProto, *, num_workers: int, **options: Any) -> DataProto:
    """What a group's method gives for each row, in the batch's own order."""
    order = balanced_order(batch, num_workers)
    return method(batch.select_idxs(order), **options).select_idxs(np.argsort(order).tolist())
