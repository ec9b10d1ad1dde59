"""Nested states as files that run no code when read: tensors as safetensors, everything else as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .durable_files import FileRecord, file_record, sync, write_text

__all__ = ["CheckpointError", "read_state", "write_state"]

_KIND = "__kind__"  # marks a JSON object that stands for something JSON does not have


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: ``path`` is the file or folder at fault, ``reason`` says the way out too."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = Path(path)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def write_state(folder: str | Path, name: str, state: Mapping[str, Any]) -> dict[str, FileRecord]:
    """Write ``name.json`` and, where the state holds tensors, ``name.safetensors``; the record of each, by file name.

    A state is made of dicts, lists, tuples, numbers, text, None, tensors (on any device) and numpy arrays. Tensors that
    are one, such as tied weights, are written once. Raises ``TypeError`` for anything else, with its place.
    """
    path = Path(folder) / f"{name}.json"
    encoder = _Encoder()
    skeleton = encoder.encode(state, ())
    records = {path.name: write_text(path, json.dumps(skeleton, indent=1) + "\n")}
    if encoder.tensors:
        file = path.with_suffix(".safetensors")
        save_file(encoder.tensors, file)
        sync(file)
        records[file.name] = file_record(file)
    return records


def read_state(folder: str | Path, name: str) -> dict[str, Any]:
    """What `write_state` wrote; tensors are on the CPU. Raises `CheckpointError` for a file that is not whole."""
    path = Path(folder) / f"{name}.json"
    tensor_path = path.with_suffix(".safetensors")
    try:
        skeleton = json.loads(path.read_text(encoding="utf-8"))
        tensors = load_file(tensor_path) if tensor_path.exists() else {}
        return _decode(skeleton, tensors)
    except FileNotFoundError:
        raise CheckpointError(path, "the file is missing") from None
    except KeyError as error:
        raise CheckpointError(tensor_path, f"the file has no tensor {error}") from None
    except SafetensorError as error:
        raise CheckpointError(tensor_path, f"the file is damaged: {error}") from None
    except ValueError as error:
        raise CheckpointError(path, f"the file is damaged: {error}") from None


class _Encoder:
    """Turns a state into what JSON has, and collects its tensors by the names that stand for them there."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[Any, str] = {}
        self._storages: set[int] = set()

    def encode(self, value: Any, place: tuple[str, ...]) -> Any:
        if isinstance(value, np.ndarray):
            # Not every release of safetensors reads unsigned numbers.
            signed = value.astype(np.int64) if value.dtype.kind == "u" else value
            return {_KIND: "array", "name": self._add(torch.from_numpy(signed), place), "dtype": str(value.dtype)}
        if isinstance(value, Tensor):
            return {_KIND: "tensor", "name": self._add(value.detach(), place)}
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Mapping):
            return self._encode_mapping(value, place)
        if isinstance(value, list | tuple):
            items = [self.encode(item, (*place, str(index))) for index, item in enumerate(value)]
            return items if isinstance(value, list) else {_KIND: "tuple", "items": items}
        if value is None or isinstance(value, str | int | float):
            return value
        raise TypeError(f"cannot save {'/'.join(place)}: a {type(value).__name__} is no number, text or tensor")

    def _encode_mapping(self, value: Mapping[Any, Any], place: tuple[str, ...]) -> Any:
        items = [[key, self.encode(item, (*place, str(key)))] for key, item in value.items()]
        if all(isinstance(key, str) and key != _KIND for key in value):
            return dict(items)
        return {_KIND: "dict", "items": [[self.encode(key, place), item] for key, item in items]}

    def _add(self, tensor: Tensor, place: tuple[str, ...]) -> str:
        identity = (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and identity in self._names:
            return self._names[identity]
        name = "/".join(place)
        self._names[identity] = name
        storage = tensor.untyped_storage().data_ptr()
        # safetensors takes no tensors that overlap in memory.
        self.tensors[name] = tensor.clone() if storage in self._storages else tensor.contiguous()
        self._storages.add(storage)
        return name


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_KIND):
        case None:
            return {key: _decode(item, tensors) for key, item in value.items()}
        case "tensor":
            return tensors[value["name"]]
        case "array":
            return tensors[value["name"]].numpy().astype(value["dtype"])
        case "tuple":
            return tuple(_decode(item, tensors) for item in value["items"])
        case "dict":
            return {_decode(key, tensors): _decode(item, tensors) for key, item in value["items"]}
        case kind:
            raise ValueError(f"it has a part of the unknown kind {kind!r}")
