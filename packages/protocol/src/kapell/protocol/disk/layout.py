"""What is in a batch file: the manifest and the names of the stored tensors.

A batch file is a safetensors file. Its metadata has the manifest under ``kapell`` and the manifest's checksum under
``kapell.crc32``. Column number i is stored as ``i.data``; jagged columns and object columns have ``i.offsets`` too:
the cuts between rows, and between the JSON texts of cells. Arrays of records and of dtypes that numpy has not are
pickled whole, where that is asked for.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from kapell.protocol.columns import raw_bytes

__all__ = ["CHECKSUM_KEY", "FORMAT_VERSION", "MANIFEST_KEY", "NATIVE", "ColumnEntry", "Manifest", "Part", "checksum"]

MANIFEST_KEY = "kapell"
CHECKSUM_KEY = "kapell.crc32"
FORMAT_VERSION = 1

# dtypes that every safetensors reader knows; others are stored as bytes.
NATIVE = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
)

Part = Literal["batch", "non_tensor_batch", "padding"]


@dataclass(frozen=True)
class ColumnEntry:
    """One column in the manifest."""

    name: str
    """Its name in the batch."""
    part: Part
    """The part of the batch that it belongs to."""
    kind: Literal["dense", "jagged", "numbers", "objects", "stack", "pickled"]
    """How it is stored: a tensor, values and offsets, an array's bytes, JSON texts and their offsets, or a pickle."""
    dtype: str = ""
    """torch's or numpy's name of the dtype."""
    row_shape: list[int] = field(default_factory=list)
    """Shape of one row of an array."""
    ragged: int = 0
    """Ragged dimension of a jagged column."""
    checksums: dict[str, int] = field(default_factory=dict)
    """CRC-32 of each stored tensor, by ``data`` and ``offsets``."""


@dataclass(frozen=True)
class Manifest:
    """What the file says about the batch as a whole."""

    rows: int
    """Rows of every column."""
    has_tensors: bool
    """Whether there is a TensorDict, even one without columns."""
    columns: list[ColumnEntry]
    """All columns, in order."""
    meta_info: Any
    """Encoded ``meta_info``."""
    version: int = FORMAT_VERSION
    """Version of this layout."""


def checksum(tensor: torch.Tensor) -> int:
    """Give the CRC-32 of a tensor's bytes."""
    return zlib.crc32(raw_bytes(tensor).numpy().data) if tensor.numel() else 0
