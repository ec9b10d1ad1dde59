"""From `DataProto` to a plain TensorDict and back, column by column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from kapell.protocol.columns import ValueStack, array_of

__all__ = ["parts_of_tensordict", "to_tensordict"]


def to_tensordict(
    batch: TensorDictBase | None, arrays: Mapping[str, Any], meta: Mapping[str, Any], num_rows: int
) -> TensorDict:
    """Put columns and ``meta_info`` into one TensorDict: arrays as one value a row, meta as values for all rows."""
    entries: dict[str, Any] = {} if batch is None else dict(batch.items())
    for name, column in arrays.items():
        entries[name] = ValueStack.of(column)
    for key, value in meta.items():
        if key in entries:
            raise ValueError(f"{key!r} is both a column and a meta_info key; rename one of them first")
        entries[key] = NonTensorData(value)
    return TensorDict(entries, batch_size=[num_rows], device=None if batch is None else batch.device)


def parts_of_tensordict(table: TensorDictBase) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Sort the entries of a TensorDict into tensor columns, numpy columns and ``meta_info``."""
    tensors: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    meta: dict[str, Any] = {}
    for name, entry in table.items():
        if isinstance(entry, torch.Tensor):
            tensors[name] = entry
        elif isinstance(entry, NonTensorStack):
            arrays[name] = array_of(entry)
        elif isinstance(entry, NonTensorData):
            meta[name] = entry.data
        else:
            tensors[name] = entry
    return tensors, arrays, meta
