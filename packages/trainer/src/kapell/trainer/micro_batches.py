"""In what portions rows go through a model: by rows or by tokens, without padding that a portion can spare."""

# N rows, B rows of a portion, P prompt and T response tokens, L = P + T; T' <= T, those that a portion needs

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .algorithms import TOKEN_COLUMNS
from .algorithms import micro_batches as pack
from .algorithms import num_micro_batches as num_packed
from .forward import Columns

__all__ = ["MicroBatches", "joined", "portions", "slices"]

_SEQUENCE_COLUMNS = frozenset({"input_ids", "attention_mask", "position_ids"})
_RESPONSE_COLUMNS = TOKEN_COLUMNS | {"responses", "response_mask", "loss_mask"}


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """The size of a portion; without either number all rows are one. It changes memory and speed, never the numbers."""

    max_rows: int | None = None
    """Most rows in one."""
    max_tokens: int | None = None
    """Most tokens in one, prompts included and padding not; goes before ``max_rows``."""

    def num_for(self, lengths: Sequence[int]) -> int:
        """How many portions rows of these lengths need. Raises ``ValueError`` for a row above the budget."""
        if not lengths:
            return 0
        if self.max_tokens is not None:
            return num_packed(lengths, max_tokens=self.max_tokens)
        return -(-len(lengths) // (self.max_rows or len(lengths)))

    def rows(self, lengths: Sequence[int], num: int) -> list[list[int]]:
        """The rows of each of ``num`` portions, of which some may be empty; by tokens they are of similar cost.

        >>> MicroBatches(max_tokens=9).rows([8, 1, 5, 4], 2)
        [[2, 3], [0, 1]]
        """
        if self.max_tokens is not None:
            return pack(lengths, max_tokens=self.max_tokens, num=num)
        size = self.max_rows or max(len(lengths), 1)
        starts = range(0, num * size, size)
        return [list(range(start, min(start + size, len(lengths)))) for start in starts]


def slices(columns: Columns, size: int | None) -> Iterator[Columns]:
    """At most ``size`` rows at a time; all at once for None, and nothing when there are none."""
    num_rows = len(next(iter(columns.values())))
    for start in range(0, num_rows, size or max(num_rows, 1)):
        stop = start + size if size else num_rows
        yield {name: column[start:stop] for name, column in columns.items()}


def portions(columns: Columns, rows: Iterable[Sequence[int]]) -> Iterator[Columns]:
    """The columns of each portion, cut to the tokens that it has; an empty one is a row without a response."""
    everything = list(range(len(columns["attention_mask"])))
    for chosen in rows:
        if not chosen:
            yield _blank(columns)
        elif list(chosen) == everything:
            yield _trimmed(columns)  # without a copy
        else:
            yield _trimmed({name: column[list(chosen)] for name, column in columns.items()})


def joined(
    parts: Iterable[Mapping[str, Tensor]], rows: Sequence[Sequence[int]], mask_NT: Tensor, names: Iterable[str]
) -> dict[str, Tensor]:
    """What portions gave, ``(B, T')`` each, as ``(N, T)`` in the order of the rows, with zeros in masked slots."""
    columns = {name: torch.zeros(mask_NT.shape, device=mask_NT.device) for name in names}
    for chosen, part in zip(rows, parts, strict=True):
        for name, column_NT in columns.items() if chosen else ():
            part_BT = part[name].float().to(mask_NT.device)
            column_NT[list(chosen)] = pad(part_BT, (0, mask_NT.shape[1] - part_BT.shape[1]))
    return {name: column_NT * mask_NT for name, column_NT in columns.items()}


def _trimmed(columns: Columns) -> Columns:
    """Without the columns of padding before the longest prompt and after the longest response."""
    used_L = columns["attention_mask"].any(0)
    num_response = columns["responses"].shape[1]
    num_prompt = len(used_L) - num_response
    start = min(
        int(used_L.int().argmax()), num_prompt - 1
    )  # what comes first is predicted from the prompt's last token
    kept = max(num_response - int(used_L[num_prompt:].flip(0).int().argmax()), 1) if used_L[num_prompt:].any() else 1
    return {
        name: column[:, start : num_prompt + kept]
        if name in _SEQUENCE_COLUMNS
        else column[:, :kept]
        if name in _RESPONSE_COLUMNS
        else column
        for name, column in columns.items()
    }


def _blank(columns: Columns) -> Columns:
    """One row that counts nowhere, for ranks that must make as many passes as the others."""
    row = {name: column.new_zeros((1, *column.shape[1:])) for name, column in columns.items()}
    last_of_prompt = row["attention_mask"].shape[1] - row["responses"].shape[1] - 1
    row["attention_mask"][:, last_of_prompt] = 1
    return _trimmed(row)
