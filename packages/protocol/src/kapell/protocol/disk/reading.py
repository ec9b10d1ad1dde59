"""Reading a batch file, or some columns and rows of it, with nothing believed that the file says."""

from __future__ import annotations

import json
import os
import pickle
import zlib
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from tensordict import TensorDict

from kapell.protocol.columns import ValueStack, column_of_objects, make_jagged
from kapell.protocol.disk.cells import decode_value, numpy_dtype, torch_dtype
from kapell.protocol.disk.errors import BatchFileError, UnsafeValueError
from kapell.protocol.disk.layout import (
    CHECKSUM_KEY,
    FORMAT_VERSION,
    MANIFEST_KEY,
    NATIVE,
    ColumnEntry,
    Manifest,
    checksum,
)

__all__ = ["read_batch"]

_DAMAGE = (SafetensorError, LookupError, TypeError, ValueError, RuntimeError, MemoryError, ArithmeticError)


def read_batch(
    path: str | os.PathLike[str],
    *,
    columns: Iterable[str] | None = None,
    rows: slice | None = None,
    allow_pickle: bool = False,
) -> tuple[TensorDict | None, dict[str, np.ndarray], dict[str, Any], np.ndarray | None]:
    """Read tensors, arrays, ``meta_info`` and padded rows. The file is memory-mapped: only what is asked for is read.

    ``rows`` is a slice without a step. Columns that are read whole are checked against their checksums.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no batch file {path}")
    wanted = None if columns is None else list(columns)
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            manifest = _manifest(file.metadata() or {})
            reader = _Reader(file, manifest, rows, allow_pickle=allow_pickle)
            _require_known(wanted, manifest)
            parts = reader.read(wanted)
            meta = decode_value(manifest.meta_info, "meta_info", allow_pickle=allow_pickle)
            if not isinstance(meta, dict):
                raise ValueError("meta_info is no dict")
    except (UnsafeValueError, _CallerError) as error:
        raise error.given if isinstance(error, _CallerError) else error from None
    except _DAMAGE as error:
        raise BatchFileError(os.fspath(path), f"{type(error).__name__}: {error}") from error
    batch = TensorDict(parts["batch"], batch_size=[reader.num_rows]) if manifest.has_tensors else None
    return batch, parts["non_tensor_batch"], meta, parts["padding"].get("")


class _CallerError(Exception):
    """Carries a mistake of the caller past the handling of damaged files."""

    def __init__(self, given: Exception) -> None:
        super().__init__(str(given))
        self.given = given


def _manifest(metadata: dict[str, str]) -> Manifest:
    text = metadata.get(MANIFEST_KEY)
    if text is None:
        raise ValueError("it is a safetensors file, but not one of a batch")
    if str(zlib.crc32(text.encode())) != metadata.get(CHECKSUM_KEY):
        raise ValueError("its manifest is damaged (wrong checksum)")
    content: dict[str, Any] = json.loads(text)
    if content.get("version") != FORMAT_VERSION:
        raise ValueError(f"it has format version {content.get('version')}, this program reads {FORMAT_VERSION}")
    content["columns"] = [ColumnEntry(**entry) for entry in content["columns"]]
    manifest = Manifest(**content)
    if type(manifest.rows) is not int or manifest.rows < 0:
        raise ValueError(f"it says that it has {manifest.rows!r} rows")
    return manifest


def _require_known(wanted: list[str] | None, manifest: Manifest) -> None:
    known = [entry.name for entry in manifest.columns if entry.part != "padding"]
    for name in wanted or ():
        if name not in known:
            raise _CallerError(KeyError(f"no column {name!r} in the file; there are {sorted(known)}"))


class _Reader:
    def __init__(self, file: Any, manifest: Manifest, rows: slice | None, *, allow_pickle: bool) -> None:
        start, stop, step = (rows or slice(None)).indices(manifest.rows)
        if step != 1:
            raise _CallerError(ValueError(f"rows are read as a slice without a step, got step {step}"))
        self._file = file
        self._manifest = manifest
        self._allow_pickle = allow_pickle
        self._start, self._stop = start, max(start, stop)
        self.num_rows = self._stop - self._start

    def read(self, wanted: list[str] | None) -> dict[str, dict[str, Any]]:
        parts: dict[str, dict[str, Any]] = {"batch": {}, "non_tensor_batch": {}, "padding": {}}
        readers: dict[str, Callable[[int, ColumnEntry], Any]] = {
            "dense": self._dense,
            "jagged": self._jagged,
            "numbers": self._numbers,
            "pickled": self._pickled,
        }
        for number, entry in enumerate(self._manifest.columns):
            if wanted is None or entry.part == "padding" or entry.name in wanted:
                parts[entry.part][entry.name] = readers.get(entry.kind, self._objects)(number, entry)
        return parts

    def _dense(self, number: int, entry: ColumnEntry) -> torch.Tensor:
        data = self._cut(number, "data", entry, self._start, self._stop)
        return _as_dtype(data, torch_dtype(entry.dtype))

    def _jagged(self, number: int, entry: ColumnEntry) -> torch.Tensor:
        dim = entry.ragged - 1
        size = self._shape(number, "data")[dim]
        offsets = self._offsets(number, entry, self._manifest.rows, size)
        first, last = int(offsets[0]), int(offsets[-1])
        values = _as_dtype(self._cut(number, "data", entry, first, last, dim=dim), torch_dtype(entry.dtype))
        return make_jagged(values, offsets - first, entry.ragged)

    def _numbers(self, number: int, entry: ColumnEntry) -> np.ndarray:
        dtype = numpy_dtype(entry.dtype)
        data = self._cut(number, "data", entry, self._start, self._stop).numpy()
        shape = (self.num_rows, *entry.row_shape)
        return data.reshape(-1).view(dtype).reshape(shape) if data.size else np.empty(shape, dtype=dtype)

    def _pickled(self, number: int, entry: ColumnEntry) -> np.ndarray:
        if not self._allow_pickle:
            raise UnsafeValueError(f"column {entry.name!r}", f"numpy array of {entry.dtype}")
        data = self._cut(number, "data", entry, 0, self._shape(number, "data")[0])
        return pickle.loads(data.numpy())[self._start : self._stop]

    def _objects(self, number: int, entry: ColumnEntry) -> Any:
        width = int(np.prod(entry.row_shape, dtype=np.int64))
        size = self._shape(number, "data")[0]
        offsets = self._offsets(number, entry, self._manifest.rows, size, width)
        first, last = int(offsets[0]), int(offsets[-1])
        data = self._cut(number, "data", entry, first, last).numpy().tobytes()
        where = f"column {entry.name!r}"
        cuts = (offsets - first).tolist()
        texts = (data[begin:end] for begin, end in pairwise(cuts))
        cells = [decode_value(json.loads(text), where, allow_pickle=self._allow_pickle) for text in texts]
        column = column_of_objects(cells).reshape((self.num_rows, *entry.row_shape))
        return ValueStack.of(column) if entry.kind == "stack" else column

    def _offsets(self, number: int, entry: ColumnEntry, rows: int, size: int, width: int = 1) -> torch.Tensor:
        """Read the cuts of the wanted rows; cuts that leave the data would be read as other memory."""
        if self._shape(number, "offsets") != [rows * width + 1]:
            raise ValueError(f"column {entry.name!r} has not one cut a row")
        offsets = self._cut(number, "offsets", entry, self._start * width, self._stop * width + 1)
        steps = offsets.diff()
        if offsets.dtype != torch.int64 or int(offsets[0]) < 0 or int(offsets[-1]) > size or bool((steps < 0).any()):
            raise ValueError(f"column {entry.name!r} has cuts outside its data")
        return offsets

    def _shape(self, number: int, suffix: str) -> list[int]:
        return list(self._file.get_slice(f"{number}.{suffix}").get_shape())

    def _cut(self, number: int, suffix: str, entry: ColumnEntry, start: int, stop: int, dim: int = 0) -> torch.Tensor:
        name = f"{number}.{suffix}"
        size = self._shape(number, suffix)[dim]
        if (start, stop) == (0, size):
            whole = self._file.get_tensor(name)
            if checksum(whole.contiguous()) != entry.checksums.get(suffix):
                raise ValueError(f"column {entry.name!r} is damaged (wrong checksum)")
            return whole
        if stop > size:
            raise ValueError(f"column {entry.name!r} has {size} entries where {stop} are needed")
        return self._file.get_slice(name)[(*[slice(None)] * dim, slice(start, stop))].clone()


def _as_dtype(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype in NATIVE:
        if data.dtype != dtype:
            raise ValueError(f"stored as {data.dtype} where {dtype} is announced")
        return data
    if data.dtype != torch.uint8 or data.dim() == 0 or data.shape[-1] != dtype.itemsize:
        raise ValueError(f"stored as {data.dtype} of shape {tuple(data.shape)}, which are not the bytes of {dtype}")
    return data.contiguous().view(dtype).squeeze(-1)
