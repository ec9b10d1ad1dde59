"""Making batches of single rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from kapell.protocol.columns import ValueStack, column_of_objects, column_of_rows
from kapell.protocol.dataproto import DataProto, DataProtoItem

__all__ = ["collate_fn", "list_of_dict_to_dict_of_list"]


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Turn rows into columns; a name that only some rows have gives a shorter list.

    >>> list_of_dict_to_dict_of_list([{"a": 1}, {"a": 2}])
    {'a': [1, 2]}
    """
    columns: dict[str, list[Any]] = {}
    for row in list_of_dict:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Make a batch of items. Tensors of one shape become a dense column, also where they were rows of a jagged one;
    of several shapes, a jagged column.
    """
    tables = [item.batch for item in x if item.batch is not None]
    arrays = list_of_dict_to_dict_of_list([item.non_tensor_batch for item in x])
    return DataProto(
        batch=_table_of_rows(tables) if tables else None,
        non_tensor_batch={name: column_of_objects(cells) for name, cells in arrays.items()},
    )


def _table_of_rows(rows: Sequence[TensorDictBase]) -> TensorDict:
    cells: list[dict[str, Any]] = [dict(row.items()) for row in rows]
    for number, row in enumerate(cells):
        if row.keys() != cells[0].keys():
            raise ValueError(f"row {number} has {sorted(row)} but row 0 has {sorted(cells[0])}")
    columns = {name: _column_of_cells([row[name] for row in cells]) for name in cells[0]}
    devices = {row.device for row in rows}
    device = devices.pop() if len(devices) == 1 else None
    return TensorDict(columns, batch_size=[len(rows), *rows[0].batch_size], device=device)


def _column_of_cells(cells: list[Any]) -> Any:
    if all(isinstance(cell, torch.Tensor) for cell in cells):
        return column_of_rows(cells)
    if all(isinstance(cell, NonTensorData) for cell in cells):
        return ValueStack.of([cell.data for cell in cells])
    if all(isinstance(cell, TensorDict) for cell in cells):
        return _table_of_rows(cells)
    return torch.stack(cells)
