"""Writing a batch file: complete under its name, or not there."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tensordict import NonTensorStack

from kapell.protocol.columns import array_of, as_in_memory, is_jagged, parts_of
from kapell.protocol.container import BatchContainer
from kapell.protocol.disk.cells import encode_value, has_plain_dtype, is_plain_tensor, type_name
from kapell.protocol.disk.errors import UnsafeValueError
from kapell.protocol.disk.layout import CHECKSUM_KEY, MANIFEST_KEY, NATIVE, ColumnEntry, Manifest, Part, checksum

__all__ = ["write_batch"]


def write_batch(batch: BatchContainer, path: str | os.PathLike[str], *, allow_pickle: bool = False) -> None:
    """Write a batch to one file, replacing one that is there."""
    batch.check_consistency()
    writer = _Writer(allow_pickle=allow_pickle)
    for name, column in batch._items():
        writer.add("non_tensor_batch" if name in batch.non_tensor_batch else "batch", name, column)
    if batch._padded is not None:
        writer.add("padding", "", batch._padded)
    meta = encode_value(batch.meta_info, "meta_info", allow_pickle=allow_pickle)
    manifest = Manifest(len(batch), batch.batch is not None, writer.entries, meta)
    text = json.dumps(asdict(manifest))
    metadata = {MANIFEST_KEY: text, CHECKSUM_KEY: str(zlib.crc32(text.encode()))}
    target = Path(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    try:
        save_file(writer.tensors, temporary, metadata=metadata)
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp is for private files, save() for ordinary ones
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


class _Writer:
    def __init__(self, *, allow_pickle: bool) -> None:
        self.entries: list[ColumnEntry] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self._allow_pickle = allow_pickle

    def add(self, part: Part, name: str, column: Any) -> None:
        if isinstance(column, NonTensorStack):
            self._objects(part, name, array_of(column), kind="stack")
        elif isinstance(column, np.ndarray):
            if column.dtype == object:
                self._objects(part, name, column, kind="objects")
            elif has_plain_dtype(column):
                self._numbers(part, name, column)
            else:
                self._pickled(part, name, column)
        elif isinstance(column, torch.Tensor) and (is_plain_tensor(column) or is_jagged(column)):
            self._tensor(part, name, column)
        else:
            raise TypeError(f"column {name!r} is a {type_name(column)}, which a batch file cannot hold")

    def _tensor(self, part: Part, name: str, column: torch.Tensor) -> None:
        dtype = str(column.dtype).removeprefix("torch.")
        if not column.is_nested:
            self._store(ColumnEntry(name, part, "dense", dtype), data=column)
            return
        values, offsets, ragged = parts_of(column)
        self._store(ColumnEntry(name, part, "jagged", dtype, ragged=ragged), data=values, offsets=offsets)

    def _numbers(self, part: Part, name: str, column: np.ndarray) -> None:
        row_bytes = column.nbytes // max(len(column), 1)
        data = np.frombuffer(column.tobytes(), dtype=np.uint8).reshape(len(column), row_bytes)
        entry = ColumnEntry(name, part, "numbers", column.dtype.str, list(column.shape[1:]))
        self._store(entry, data=torch.from_numpy(data.copy()))

    def _pickled(self, part: Part, name: str, column: np.ndarray) -> None:
        if not self._allow_pickle:
            raise UnsafeValueError(f"column {name!r}", type_name(column))
        data = torch.frombuffer(bytearray(pickle.dumps(column)), dtype=torch.uint8)
        self._store(ColumnEntry(name, part, "pickled", str(column.dtype)), data=data)

    def _objects(self, part: Part, name: str, column: np.ndarray, kind: Any) -> None:
        where = f"column {name!r}"
        encoded = (encode_value(cell, where, allow_pickle=self._allow_pickle) for cell in column.flat)
        texts = [json.dumps(cell).encode() for cell in encoded]
        offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        data = (
            torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
            if texts
            else torch.empty(0, dtype=torch.uint8)
        )
        entry = ColumnEntry(name, part, kind, row_shape=list(column.shape[1:]))
        self._store(entry, data=data, offsets=torch.from_numpy(offsets))

    def _store(self, entry: ColumnEntry, **tensors: torch.Tensor) -> None:
        number = len(self.entries)
        for suffix, tensor in tensors.items():
            plain = as_in_memory(tensor)
            if plain.dtype not in NATIVE:
                plain = plain.unsqueeze(-1).view(torch.uint8)
            if plain.untyped_storage().nbytes() != plain.nbytes or plain.data_ptr() == tensor.data_ptr():
                plain = plain.clone()  # safetensors refuses tensors that share memory, as columns may
            self.tensors[f"{number}.{suffix}"] = plain
            entry.checksums[suffix] = checksum(plain)
        self.entries.append(entry)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
