"""Python values as JSON. What JSON has not is tagged: ``{"!": tag, ...}``; unknown types are refused by name."""

from __future__ import annotations

import base64
import math
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from kapell.protocol.columns import column_of_objects, raw_bytes
from kapell.protocol.disk.errors import UnsafeValueError

__all__ = ["decode_value", "encode_value"]

_TAG = "!"
_PLAIN = frozenset({str, int, float, bool, type(None)})
_DTYPE_KINDS = frozenset("biufcmMSUV")  # numpy's, of numbers, text, times and bytes


def encode_value(value: Any, where: str, *, allow_pickle: bool = False) -> Any:
    """Give what `json.dumps` can write for a value. ``where`` names its place in messages."""
    kind = type(value)
    if kind in _PLAIN:
        return value

    def encode(entry: Any) -> Any:
        return encode_value(entry, where, allow_pickle=allow_pickle)

    encoder = _ENCODERS.get(kind, _encode_scalar)
    encoded = encoder(value, encode)
    if encoded is not None:
        return encoded
    if allow_pickle:
        return {_TAG: "pickle", "type": kind.__qualname__, "data": _text(pickle.dumps(value))}
    raise UnsafeValueError(where, type_name(value))


def decode_value(value: Any, where: str, *, allow_pickle: bool = False) -> Any:
    """Give the value that `encode_value` wrote. Raises ValueError for what it cannot have written."""
    if isinstance(value, list):
        return [decode_value(entry, where, allow_pickle=allow_pickle) for entry in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(_TAG)
    if tag is None:
        return {key: decode_value(entry, where, allow_pickle=allow_pickle) for key, entry in value.items()}
    if tag == "pickle":
        if not allow_pickle:
            raise UnsafeValueError(where, str(value.get("type")))
        return pickle.loads(_bytes(value["data"]))
    decoder = _DECODERS.get(tag)
    if decoder is None:
        raise ValueError(f"{where} holds an unknown kind of value, {tag!r}")
    try:
        return decoder(value, lambda entry: decode_value(entry, where, allow_pickle=allow_pickle))
    except (KeyError, AttributeError, TypeError) as error:
        if isinstance(error, UnsafeValueError):
            raise
        raise ValueError(f"{where} holds a malformed {tag}: {error}") from error


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _encode_dict(value: dict[Any, Any], encode: Callable[[Any], Any]) -> Any:
    if _TAG not in value and all(type(key) is str for key in value):
        return {key: encode(entry) for key, entry in value.items()}
    return {_TAG: "dict", "items": [[encode(key), encode(entry)] for key, entry in value.items()]}


def _encode_scalar(value: Any, encode: Callable[[Any], Any]) -> Any:
    if not isinstance(value, np.generic) or not has_plain_dtype(value):
        return None
    return {_TAG: "scalar", "dtype": value.dtype.str, "data": _text(value.tobytes())}


def _encode_array(value: np.ndarray, encode: Callable[[Any], Any]) -> Any:
    if value.dtype == object:
        return {_TAG: "objects", "shape": list(value.shape), "items": [encode(cell) for cell in value.flat]}
    if not has_plain_dtype(value):
        return None
    return {_TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": _text(value.tobytes())}


def _encode_tensor(value: torch.Tensor, encode: Callable[[Any], Any]) -> Any:
    if not is_plain_tensor(value):
        return None
    data = raw_bytes(value).numpy().tobytes()
    dtype = str(value.dtype).removeprefix("torch.")
    return {_TAG: "tensor", "dtype": dtype, "shape": list(value.shape), "data": _text(data)}


def _tagged_items(tag: str) -> Callable[[Iterable[Any], Callable[[Any], Any]], Any]:
    return lambda value, encode: {_TAG: tag, "items": [encode(entry) for entry in value]}


# None where the value has no form without pickle.
_ENCODERS: dict[type, Callable[[Any, Callable[[Any], Any]], Any]] = {
    list: lambda value, encode: [encode(entry) for entry in value],
    dict: _encode_dict,
    tuple: _tagged_items("tuple"),
    set: _tagged_items("set"),
    frozenset: _tagged_items("frozenset"),
    bytes: lambda value, encode: {_TAG: "bytes", "data": _text(value)},
    complex: lambda value, encode: {_TAG: "complex", "items": [value.real, value.imag]},
    np.ndarray: _encode_array,
    torch.Tensor: _encode_tensor,
}


def _numbers(value: dict[str, Any]) -> np.ndarray:
    dtype, shape, data = numpy_dtype(value["dtype"]), value["shape"], _bytes(value["data"])
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes do not make an array of {dtype} and shape {shape}")
    return np.frombuffer(data, dtype=dtype).reshape(shape).copy() if data else np.empty(shape, dtype=dtype)


def _tensor(value: dict[str, Any]) -> torch.Tensor:
    dtype, shape, data = torch_dtype(value["dtype"]), value["shape"], _bytes(value["data"])
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes do not make a tensor of {dtype} and shape {shape}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)


_DECODERS: dict[str, Callable[[dict[str, Any], Callable[[Any], Any]], Any]] = {
    "dict": lambda value, decode: {decode(key): decode(entry) for key, entry in value["items"]},
    "tuple": lambda value, decode: tuple(map(decode, value["items"])),
    "set": lambda value, decode: set(map(decode, value["items"])),
    "frozenset": lambda value, decode: frozenset(map(decode, value["items"])),
    "bytes": lambda value, decode: _bytes(value["data"]),
    "complex": lambda value, decode: complex(*value["items"]),
    "scalar": lambda value, decode: _numbers({**value, "shape": []})[()],
    "array": lambda value, decode: _numbers(value),
    "objects": lambda value, decode: column_of_objects(map(decode, value["items"])).reshape(value["shape"]),
    "tensor": lambda value, decode: _tensor(value),
}


def type_name(value: Any) -> str:
    """Say what a value is, in messages about values that cannot be stored."""
    kind = type(value)
    if isinstance(value, torch.Tensor) and (kind is torch.Tensor or value.is_nested):
        return f"{value.dtype} tensor with layout {value.layout} on {value.device}"
    if isinstance(value, np.ndarray):
        return f"numpy array of {value.dtype}"
    return f"{kind.__module__}.{kind.__qualname__}"


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Say whether dtype, shape and the bytes of its numbers are all of a tensor."""
    return tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def has_plain_dtype(value: np.ndarray | np.generic) -> bool:
    """Say whether the name of its dtype says all of it: not for records, nor for dtypes that numpy has not itself."""
    dtype = value.dtype
    try:
        return dtype.kind in _DTYPE_KINDS and dtype == np.dtype(dtype.str)
    except TypeError:  # numpy does not know the name
        return False


def numpy_dtype(name: str) -> np.dtype:
    """Give a numpy dtype of numbers or text by its name."""
    dtype = np.dtype(str(name))
    if dtype.hasobject or dtype.kind not in _DTYPE_KINDS or dtype.fields:
        raise ValueError(f"{name!r} is no dtype of numbers or text")
    return dtype


def torch_dtype(name: str) -> torch.dtype:
    """Give a torch dtype by its name."""
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return dtype
