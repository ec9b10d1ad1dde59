"""Columns of a small batch as plain values: pickle takes and gives them back in a third of a stand-in's time."""

# B rows

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from kapell.protocol.columns import column_of_objects
from kapell.protocol.packing import is_plain

__all__ = ["compacted", "opened_arrays", "opened_tensors"]

Numbers = tuple[str, tuple[int, ...], bytearray]
"""numpy's name of the dtype, the shape (B, ...), and a copy of the memory, row after row."""

_KINDS = frozenset("biufcSU")  # numpy's, without those that refer to objects


def compacted(
    tensors: Mapping[str, Any], arrays: Mapping[str, np.ndarray], room: int
) -> tuple[dict[str, Numbers], dict[str, Numbers | list[Any]]] | None:
    """Give tensor and array columns as plain values, those of objects as lists.

    None where they need more than ``room`` bytes (8 for an object), where two columns share memory (which must not
    travel twice), and for anything but dense tensors of the CPU, arrays of numbers and text, and plain objects.
    """
    if any(type(column) is not torch.Tensor for column in tensors.values()):
        return None
    if any(type(array) is not np.ndarray for array in arrays.values()):
        return None
    views: dict[str, np.ndarray] = {}
    for name, column in tensors.items():
        try:
            views[name] = column.numpy()
        except (TypeError, RuntimeError):  # on another device, nested, with a gradient, of a dtype that numpy lacks
            return None
    every = (*views.values(), *arrays.values())
    sizes = [array.nbytes for array in every]
    if sum(sizes) > room or not all(sizes):  # what has no bytes has no memory to tell it by
        return None
    places = {column.data_ptr() for column in tensors.values()}
    others: dict[str, Numbers | list[Any]] = {}
    for name, array in arrays.items():
        if array.dtype == object:
            places.add(id(array))
            cells = others[name] = array.tolist()
            if array.ndim != 1 or not all(map(is_plain, cells)):
                return None
        elif array.dtype.kind in _KINDS:
            places.add(array.__array_interface__["data"][0])
            others[name] = _numbers(array)
        else:
            return None
    if len(places) < len(every):
        return None
    return {name: _numbers(view) for name, view in views.items()}, others


def _numbers(array: np.ndarray) -> Numbers:
    return array.dtype.str, array.shape, bytearray(array.data)


def opened_tensors(numbers: Mapping[str, Numbers]) -> dict[str, torch.Tensor]:
    """Give the tensors of `compacted`, over the memory that came."""
    return {name: torch.from_numpy(np.ndarray(shape, dtype, data)) for name, (dtype, shape, data) in numbers.items()}


def opened_arrays(columns: Mapping[str, Numbers | list[Any]]) -> dict[str, np.ndarray]:
    """Give the arrays of `compacted`, over the memory that came."""
    return {
        name: column_of_objects(column) if type(column) is list else np.ndarray(column[1], column[0], column[2])
        for name, column in columns.items()
    }
