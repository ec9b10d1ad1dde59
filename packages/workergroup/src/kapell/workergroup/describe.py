"""Shapes of what a rank was given, for error messages; by structure, without knowing any batch type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["column_shapes"]

_MAX_COLUMNS = 16  # an error message is read by people


def column_shapes(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Shape and dtype of each column and array among the arguments, by name.

    >>> column_shapes({"ids": [1, 2, 3], "scale": 2.0})
    {'ids': '3 rows of list'}
    """
    shapes: dict[str, str] = {}
    for name, value in arguments.items():
        for column, part in _columns(name, value):
            if len(shapes) == _MAX_COLUMNS:
                shapes["..."] = "more columns"
                return shapes
            if shape := _shape(part):
                shapes[column] = shape
    return shapes


def _columns(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The columns of a batch (two mappings, or one), or the value itself."""
    known = getattr(value, "column_facts", None)  # of one that lies elsewhere
    parts = [known] if known else [getattr(value, attribute, None) for attribute in ("batch", "non_tensor_batch")]
    tables = [part for part in parts if hasattr(part, "items")] or ([value] if hasattr(value, "items") else [])
    if not tables:
        yield name, value
    for table in tables:
        yield from ((str(column), part) for column, part in table.items())


def _shape(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"{tuple(shape)} {getattr(value, 'dtype', '')}".rstrip()
    if isinstance(value, list | tuple):
        return f"{len(value)} rows of {type(value).__name__}"
    return ""
