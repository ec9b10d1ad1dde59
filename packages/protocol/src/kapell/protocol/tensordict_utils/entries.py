"""Reading, taking out, comparing and uniting the entries of plain TensorDicts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from kapell.protocol.columns import same
from kapell.protocol.unions import union_tensor_dict

__all__ = [
    "assert_tensordict_eq",
    "contiguous",
    "get",
    "get_keys",
    "get_non_tensor_data",
    "maybe_fix_3d_position_ids",
    "pop",
    "pop_keys",
    "union_tensor_dict",
    "unwrap_non_tensor_data",
]


def get(tensordict: TensorDictBase, key: str, default: Any = None) -> Any:
    """Give a tensor, a list with one value a row, or the value for all rows; ``default`` where there is none."""
    return _opened(tensordict.get(key)) if key in tensordict.keys() else default  # noqa: SIM118


def get_keys(tensordict: TensorDictBase, keys: Iterable[str]) -> TensorDict:
    """Give a TensorDict of the named entries."""
    return TensorDict(_entries(tensordict, keys), batch_size=tensordict.batch_size, device=tensordict.device)


def pop(tensordict: TensorDictBase, key: str, default: Any = None) -> Any:
    """Take an entry out, in the form that `get` gives. Changes ``tensordict``."""
    value = get(tensordict, key, default)
    tensordict.pop(key, None)
    return value


def pop_keys(tensordict: TensorDictBase, keys: Iterable[str]) -> TensorDict:
    """Take the named entries out, or change nothing when one is missing. Changes ``tensordict``."""
    popped = get_keys(tensordict, keys := list(keys))
    for key in keys:
        tensordict.pop(key)
    return popped


def get_non_tensor_data(data: TensorDictBase, key: str, default: Any) -> Any:
    """Give the value for all rows of this name, or ``default``."""
    return unwrap_non_tensor_data(data.get(key, default))


def unwrap_non_tensor_data(data: Any) -> Any:
    """Give what a NonTensorData wraps, and anything else as it is."""
    return data.data if isinstance(data, NonTensorData) else data


def contiguous(data: TensorDictBase) -> TensorDict:
    """Give a TensorDict whose tensors are contiguous."""
    entries = {name: value.contiguous() if isinstance(value, torch.Tensor) else value for name, value in data.items()}
    return TensorDict(entries, batch_size=data.batch_size, device=data.device)


def maybe_fix_3d_position_ids(data: TensorDictBase) -> None:
    """Do nothing: the ragged dimension of jagged columns is kept by every operation of this package."""


def assert_tensordict_eq(tensordict1: TensorDictBase, tensordict2: TensorDictBase) -> None:
    """Raise AssertionError, with the name of the entry, where two TensorDicts differ (NaN equals NaN)."""
    names, others = set(tensordict1.keys()), set(tensordict2.keys())
    if names != others:
        raise AssertionError(f"entries differ: only one side has {sorted(names ^ others)}")
    for name in sorted(names):
        left, right = _opened(tensordict1.get(name)), _opened(tensordict2.get(name))
        if not same(left, right):
            raise AssertionError(f"entry {name!r} differs: {left!r} against {right!r}")


def _entries(tensordict: TensorDictBase, keys: Iterable[str]) -> dict[str, Any]:
    present = list(tensordict.keys())
    entries = {}
    for key in keys:
        if key not in present:
            raise KeyError(f"no entry {key!r}; there are {sorted(present)}")
        entries[key] = tensordict.get(key)
    return entries


def _opened(entry: Any) -> Any:
    if isinstance(entry, NonTensorStack):
        return entry.tolist()
    return unwrap_non_tensor_data(entry)
