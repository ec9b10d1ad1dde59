"""Tensor columns before anybody asks for their TensorDict: making one takes longer than cutting or joining rows."""

# B rows

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from kapell.protocol.columns import num_bytes

__all__ = ["TensorColumns"]


class TensorColumns:
    """Columns of B rows by name, and the device that their TensorDict notes. Nobody changes it."""

    __slots__ = ("device", "entries", "num_rows", "row_bytes")

    def __init__(
        self, entries: dict[str, Any], num_rows: int, device: torch.device | None, row_bytes: int | None = None
    ) -> None:
        self.entries = entries
        self.num_rows = num_rows
        self.device = device
        self.row_bytes = row_bytes  # None where rows differ, or nobody has weighed them

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        if self.row_bytes is None:
            return sum(map(_bytes_of, self.entries.values()))
        return self.row_bytes * self.num_rows

    def weigh_rows(self) -> int | None:
        """Give the bytes of each row, None where rows differ."""
        if self.row_bytes is None and self.num_rows and all(map(_is_dense, self.entries.values())):
            self.row_bytes = self.nbytes // self.num_rows
        return self.row_bytes

    def table(self) -> TensorDict:
        """Make the TensorDict."""
        return TensorDict(self.entries, batch_size=[self.num_rows], device=self.device)


def _is_dense(column: Any) -> bool:
    return type(column) is torch.Tensor and not column.is_nested


def _bytes_of(column: Any) -> int:
    return column.nbytes if _is_dense(column) else num_bytes(column)
