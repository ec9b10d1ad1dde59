"""Making TensorDicts from columns, rows and single values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from kapell.protocol.columns import ValueStack, column_of_rows, flat_objects, from_rows, is_jagged, num_rows

__all__ = [
    "assign_non_tensor",
    "assign_non_tensor_data",
    "assign_non_tensor_stack",
    "get_tensordict",
    "list_of_dict_to_tensordict",
    "nested_tensor_from_tensor_list",
]


def get_tensordict(tensor_dict: Mapping[str, Any], non_tensor_dict: Mapping[str, Any] | None = None) -> TensorDict:
    """Build a TensorDict of columns and of values that hold for all rows.

    A list or array in ``tensor_dict`` becomes one value a row. Without columns the batch size is empty.

    >>> data = get_tensordict({"ids": torch.arange(2), "text": ["a", "b"]}, {"step": 1})
    >>> data.batch_size, data["text"], data["step"]
    (torch.Size([2]), LinkedList(['a', 'b']), 1)
    """
    entries: dict[str, Any] = {}
    rows, since = None, None
    for name, value in tensor_dict.items():
        entries[name] = column = _column(name, value)
        if rows is not None and num_rows(column) != rows:
            raise ValueError(f"column {name!r} has {num_rows(column)} rows, but there are {rows} in column {since!r}")
        rows, since = num_rows(column), since or name
    for name, value in (non_tensor_dict or {}).items():
        if name in entries:
            raise ValueError(f"{name!r} is both a column and a value for all rows")
        entries[name] = value if isinstance(value, NonTensorData) else NonTensorData(value)
    return TensorDict(entries, batch_size=[] if rows is None else [rows])


def assign_non_tensor_data(tensor_dict: TensorDictBase, key: str, val: Any) -> None:
    """Set a value that holds for all rows. Changes ``tensor_dict``."""
    _require_tensordict(tensor_dict)
    tensor_dict[key] = NonTensorData(val)


def assign_non_tensor_stack(tensor_dict: TensorDictBase, key: str, val: Sequence[Any] | np.ndarray) -> None:
    """Set one value a row. Changes ``tensor_dict``."""
    _require_tensordict(tensor_dict)
    tensor_dict[key] = ValueStack.of(val)


def assign_non_tensor(tensor_dict: TensorDictBase, **kwargs: Any) -> TensorDictBase:
    """Set lists as one value a row and anything else as a value for all rows. Changes ``tensor_dict`` and gives it."""
    for key, value in kwargs.items():
        if isinstance(value, list):
            assign_non_tensor_stack(tensor_dict, key, value)
        elif isinstance(value, NonTensorData | NonTensorStack):
            tensor_dict[key] = value
        else:
            assign_non_tensor_data(tensor_dict, key, value)
    return tensor_dict


def nested_tensor_from_tensor_list(tensors: Sequence[torch.Tensor], ragged_idx: int | None = None) -> torch.Tensor:
    """Make a jagged tensor of rows whose ragged dimension is declared: the last one, or ``ragged_idx`` (rows are 0).

    >>> nested_tensor_from_tensor_list([torch.zeros(4, 3), torch.zeros(4, 3)])._ragged_idx
    2
    """
    return from_rows(tensors, ragged_idx)


def list_of_dict_to_tensordict(list_of_dicts: Sequence[Mapping[str, Any]]) -> TensorDict:
    """Make a TensorDict of rows; tensors of one shape are stacked, of several become jagged, else one value a row."""
    if not list_of_dicts:
        raise ValueError("a TensorDict of rows needs at least one row")
    names = list_of_dicts[0].keys()
    for number, row in enumerate(list_of_dicts):
        if row.keys() != names:
            raise ValueError(f"row {number} has {sorted(row)} but row 0 has {sorted(names)}")
    columns = {name: _column_of_rows([row[name] for row in list_of_dicts]) for name in names}
    return TensorDict(columns, batch_size=[len(list_of_dicts)])


def _column_of_rows(cells: list[Any]) -> torch.Tensor | ValueStack:
    if not all(isinstance(cell, torch.Tensor) for cell in cells):
        return ValueStack.of(cells)
    return column_of_rows(cells)


def _column(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.is_nested and not is_jagged(value):
            raise ValueError(f"column {name!r} is nested with layout {value.layout}; build it with layout=torch.jagged")
        if value.dim() == 0:
            raise ValueError(f"column {name!r} has no rows: it is a single value of shape ()")
        return value
    if isinstance(value, NonTensorStack | TensorDictBase):
        return value
    if isinstance(value, list | np.ndarray):
        if any(isinstance(cell, torch.Tensor) for cell in value):
            raise TypeError(
                f"column {name!r} is a list of tensors; stack it, or make it jagged with nested_tensor_from_tensor_list"
            )
        return ValueStack.of(flat_objects(value) if isinstance(value, np.ndarray) else value)
    raise TypeError(f"column {name!r} is a tensor, a list or an array, got {type(value).__name__}")


def _require_tensordict(value: Any) -> None:
    if not isinstance(value, TensorDictBase):
        raise TypeError(f"a TensorDict is assigned to, got {type(value).__name__}")
