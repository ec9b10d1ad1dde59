"""verl's serialization of single tensors and TensorDicts as dtype, shape and bytes. `pack` is the wire format."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from kapell.protocol.columns import raw_bytes

__all__ = [
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "serialize_single_tensor",
    "serialize_tensordict",
]

TensorBytes = tuple[str, tuple[int, ...], Any]


def serialize_single_tensor(obj: torch.Tensor) -> TensorBytes:
    """Give dtype name, shape, and the bytes as an array that shares the tensor's memory where it can."""
    return str(obj.dtype).removeprefix("torch."), tuple(obj.shape), raw_bytes(obj).numpy()


def deserialize_single_tensor(arr: TensorBytes) -> torch.Tensor:
    """Build a tensor, with memory of its own, from what `serialize_single_tensor` gave."""
    dtype, shape, data = arr
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype of torch")
    if 0 in shape:
        return torch.empty(shape, dtype=torch_dtype)
    copy = np.frombuffer(data, dtype=np.uint8).copy()
    return torch.from_numpy(copy).view(torch_dtype).view(shape)


def serialize_tensordict(batch: TensorDictBase) -> tuple[tuple[int, ...], str | None, dict[str, tuple[Any, ...]]]:
    """Give batch size, device and serialized entries; a nested entry is its layout and its rows."""
    encoded: dict[str, tuple[Any, ...]] = {}
    tensors: dict[str, Any] = dict(batch.items())
    for name, tensor in tensors.items():
        if tensor.is_nested:
            rows = [serialize_single_tensor(row) for row in tensor.unbind()]
            encoded[name] = (str(tensor.layout).removeprefix("torch."), rows)
        else:
            encoded[name] = serialize_single_tensor(tensor)
    return tuple(batch.batch_size), None if batch.device is None else str(batch.device), encoded


def deserialize_tensordict(arr: tuple[tuple[int, ...], str | None, dict[str, tuple[Any, ...]]]) -> TensorDict:
    """Build a TensorDict from what `serialize_tensordict` gave."""
    batch_size, device, encoded = arr
    return TensorDict({name: _decoded(name, item) for name, item in encoded.items()}, batch_size, device=device)


def _decoded(name: str, item: tuple[Any, ...]) -> torch.Tensor:
    if len(item) == 3:
        return deserialize_single_tensor(item)
    if len(item) != 2:
        raise ValueError(f"entry {name!r} is encoded as {len(item)} parts; 2 for a nested tensor, 3 for another")
    layout, rows = item
    tensors = [deserialize_single_tensor(row) for row in rows]
    return torch.nested.as_nested_tensor(tensors, layout=getattr(torch, layout))
