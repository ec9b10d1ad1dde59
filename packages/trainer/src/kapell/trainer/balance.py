"""Deals the rows of a batch to workers so that each gets about as many tokens."""

# B rows, P padded prompt and T response tokens

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from kapell.decorators import karmarkar_karp
from kapell.protocol import DataProto

__all__ = ["RowSizes", "balanced_call"]

_PRICE_OF_PROMPTS = 1.1  # times the mean: what the busiest worker may have with prompts kept whole; sharing saves more


@dataclass(frozen=True)
class RowSizes:
    """What the rows of a batch cost a worker."""

    lengths: np.ndarray
    """``(B,)``: tokens, padding not counted."""
    prompts: np.ndarray
    """``(B,)``: a number for each prompt, which neighbours with one prompt share."""

    @classmethod
    def of(cls, batch: DataProto) -> Self:
        """Those of a batch with ``prompts`` and ``prompt_mask``, ``(B, P)``, and ``response_mask``, ``(B, T)``.

        Without these, of one with ``input_ids`` and ``attention_mask``, ``(B, P + T)``, and ``responses``, ``(B, T)``.
        """
        if "prompts" in batch.columns:  # small, and here where the other columns are held by reference
            ids_BP, mask_BP, mask_BT = _arrays(batch, "prompts", "prompt_mask", "response_mask")
            lengths_B = mask_BP.sum(1) + mask_BT.sum(1)
        else:
            ids_BL, mask_BL, responses_BT = _arrays(batch, "input_ids", "attention_mask", "responses")
            lengths_B = mask_BL.sum(1)
            num_prompt = ids_BL.shape[1] - responses_BT.shape[1]
            ids_BP, mask_BP = ids_BL[:, :num_prompt], mask_BL[:, :num_prompt]
        differs = np.zeros(len(ids_BP), dtype=bool)
        for column_BP in (ids_BP, mask_BP):
            differs[1:] |= (column_BP[1:] != column_BP[:-1]).any(1)
        return cls(lengths_B, differs.cumsum())

    def balanced(self, rows: Sequence[int] | np.ndarray, num_workers: int) -> np.ndarray:
        """These rows in an order of which each worker takes a piece in turn: as many rows and tokens as the others.

        Neighbours with one prompt, which a worker computes once, stay together where the balance allows it.
        """
        rows = np.asarray(rows, dtype=np.int64)
        lengths = self.lengths[rows]
        parts = self._whole_prompts(rows, lengths, num_workers)
        parts = parts or karmarkar_karp(lengths.tolist(), num_workers, equal_size=True)
        largest_first = sorted(parts, key=len, reverse=True)  # as dispatch cuts them
        return rows[[place for part in largest_first for place in part]]

    def _whole_prompts(self, rows: np.ndarray, lengths: np.ndarray, num_workers: int) -> list[list[int]] | None:
        """Places among the rows for each worker, those of a prompt together; None where one would have too much."""
        starts = np.flatnonzero(np.diff(self.prompts[rows], prepend=-1))
        size, uneven = divmod(len(rows), len(starts) or 1)
        if size < 2 or uneven or len(starts) % num_workers or (np.diff(starts) != size).any():
            return None
        tokens = lengths.reshape(-1, size).sum(1).tolist()
        dealt = karmarkar_karp(tokens, num_workers, equal_size=True)
        most = max(sum(tokens[group] for group in part) for part in dealt)
        if most > _PRICE_OF_PROMPTS * sum(tokens) / num_workers:
            return None
        return [[place for group in part for place in range(group * size, (group + 1) * size)] for part in dealt]


def _arrays(batch: DataProto, *names: str) -> list[np.ndarray]:
    return [batch.column(name).cpu().numpy() for name in names]


def balanced_call(method: Callable[..., DataProto], batch: DataProto, *, num_workers: int, **options: Any) -> DataProto:
    """What a group's method gives for each row, in the batch's own order."""
    order = RowSizes.of(batch).balanced(range(len(batch)), num_workers)
    return method(batch.select_idxs(order), **options).select_idxs(np.argsort(order))
