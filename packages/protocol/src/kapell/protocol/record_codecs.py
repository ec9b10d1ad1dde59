"""How recorded calls store batches, tensors and arrays: safetensors files, which run no code when read.

`kapell.workergroup` finds these by the entry points "kapell.codecs"; this module knows nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
from tensordict import TensorDictBase

from kapell.protocol.columns import as_in_memory
from kapell.protocol.dataproto import DataProto

__all__ = ["ArrayCodec", "BatchCodec", "TensorCodec", "TensorDictCodec"]

_VALUE = "value"


@dataclass(frozen=True)
class BatchCodec:
    """Stores a `DataProto` as `DataProto.save` does: objects that JSON cannot express are refused by name."""

    name: str = "batch"
    """Names the codec in records."""

    def handles(self, value: Any) -> bool:
        """Whether it is a batch."""
        return isinstance(value, DataProto)

    def save(self, value: DataProto, path: Path) -> None:
        """Write the batch."""
        value.save(path)

    def load(self, path: Path) -> DataProto:
        """Read the batch."""
        return DataProto.load(path)


@dataclass(frozen=True)
class TensorDictCodec:
    """Stores a TensorDict with one batch dimension as a batch is stored."""

    name: str = "tensordict"
    """Names the codec in records."""

    def handles(self, value: Any) -> bool:
        """Whether it is a TensorDict of rows."""
        return isinstance(value, TensorDictBase) and len(value.batch_size) == 1

    def save(self, value: TensorDictBase, path: Path) -> None:
        """Write the TensorDict."""
        DataProto.from_tensordict(value).save(path)

    def load(self, path: Path) -> TensorDictBase:
        """Read the TensorDict."""
        return DataProto.load(path).to_tensordict()


@dataclass(frozen=True)
class TensorCodec:
    """Stores a dense tensor of any shape; it is read into the memory of the CPU."""

    name: str = "tensor"
    """Names the codec in records."""

    def handles(self, value: Any) -> bool:
        """Whether it is a tensor that is neither nested nor sparse."""
        return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested

    def save(self, value: torch.Tensor, path: Path) -> None:
        """Write the tensor."""
        safetensors.torch.save_file({_VALUE: as_in_memory(value)}, path)

    def load(self, path: Path) -> torch.Tensor:
        """Read the tensor."""
        return safetensors.torch.load_file(path)[_VALUE]


@dataclass(frozen=True)
class ArrayCodec:
    """Stores a numpy array of numbers or truth values, of any shape."""

    name: str = "array"
    """Names the codec in records."""

    def handles(self, value: Any) -> bool:
        """Whether it is an array of a dtype that safetensors has."""
        return isinstance(value, np.ndarray) and value.dtype in _ARRAY_DTYPES

    def save(self, value: np.ndarray, path: Path) -> None:
        """Write the array."""
        safetensors.numpy.save_file({_VALUE: np.ascontiguousarray(value).reshape(value.shape)}, path)

    def load(self, path: Path) -> np.ndarray:
        """Read the array."""
        return safetensors.numpy.load_file(path)[_VALUE]


_ARRAY_DTYPES = frozenset(
    np.dtype(name) for name in ("bool", "f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
)
