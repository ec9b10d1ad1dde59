"""Union of columns: new names are added, common names must hold the same values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from kapell.protocol.columns import same

__all__ = ["union_columns", "union_numpy_dict", "union_tensor_dict"]


def union_columns(
    left: Mapping[str, Any] | TensorDictBase | None, right: Mapping[str, Any] | TensorDictBase | None
) -> dict[str, Any]:
    """Merge two sets of columns into a new dict; a name with two values is an error, and nothing has changed then."""
    merged = dict(left.items()) if left is not None else {}
    for name, column in right.items() if right is not None else ():
        if name in merged and not same(merged[name], column):
            raise ValueError(
                f"`{name}` in tensor_dict1 and tensor_dict2 are not the same object. "
                f"Both have column {name!r}, with different values; rename or pop one of them first"
            )
        merged.setdefault(name, column)
    return merged


def union_tensor_dict(tensor_dict1: TensorDictBase, tensor_dict2: TensorDictBase) -> TensorDictBase:
    """Add the entries of the second TensorDict to the first, which is given back; where they overlap they must agree.

    Changes ``tensor_dict1``, as in verl, or nothing at all when there is a conflict. NaN equals NaN.
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise ValueError(
            f"two TensorDicts are united when their batch sizes agree, got {tuple(tensor_dict1.batch_size)} and "
            f"{tuple(tensor_dict2.batch_size)}"
        )
    present = set(tensor_dict1.keys())
    for name, entry in union_columns(tensor_dict1, tensor_dict2).items():
        if name not in present:
            tensor_dict1.set(name, entry)
    return tensor_dict1


def union_numpy_dict(
    tensor_dict1: Mapping[str, np.ndarray], tensor_dict2: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Give a dict with the arrays of both, which must agree where they overlap (NaN equals NaN)."""
    for number, columns in enumerate((tensor_dict1, tensor_dict2), start=1):
        for name, column in columns.items():
            if not isinstance(column, np.ndarray):
                raise TypeError(f"`{name}` in tensor_dict{number} is a numpy array, got {type(column).__name__}")
    return union_columns(tensor_dict1, tensor_dict2)
