"""Padding a batch to a divisor, and taking the padding away."""

from __future__ import annotations

import numpy as np

from kapell.protocol.dataproto import DataProto

__all__ = ["pad_dataproto_to_divisor", "unpad_dataproto"]


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append copies of the first rows until the size divides; give the padded batch and the rows added.

    >>> batch = DataProto.from_dict(non_tensors={"n": [1, 2, 3]})
    >>> padded, added = pad_dataproto_to_divisor(batch, 2)
    >>> padded.non_tensor_batch["n"].tolist(), added
    ([1, 2, 3, 1], 1)
    """
    if not isinstance(data, DataProto):
        raise TypeError(f"a DataProto is padded, got {type(data).__name__}")
    if size_divisor < 1:
        raise ValueError(f"size_divisor is at least 1, got {size_divisor}")
    pad_size = -len(data) % size_divisor
    return data._padded_with(np.arange(pad_size) % max(len(data), 1)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Leave out the last ``pad_size`` rows."""
    if not 0 <= pad_size <= len(data):
        raise ValueError(f"cannot take {pad_size} padding rows from a batch of {len(data)}")
    return data.slice(0, len(data) - pad_size)
