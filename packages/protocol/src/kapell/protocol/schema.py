"""Schemas: what columns a batch has, their dtypes, and shapes with named dimensions that must agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from kapell.protocol.columns import is_jagged, parts_of
from kapell.protocol.container import BatchContainer
from kapell.protocol.stored import StoredBatch
from kapell.protocol.stored_columns import ColumnFacts

__all__ = ["Column", "Ragged", "Schema", "SchemaError"]


@dataclass(frozen=True)
class Ragged:
    """A dimension whose length differs from row to row; columns with the same name have the same lengths."""

    name: str
    """What the lengths are called."""

    def __str__(self) -> str:
        return f"~{self.name}"


@dataclass(frozen=True)
class Column:
    """What a schema says of one column."""

    dtype: Any = None
    """torch or numpy dtype, ``object``, or a tuple of those allowed; None allows all."""
    shape: tuple[str | int | Ragged, ...] | None = None
    """Dimensions, rows first: a name (the same size wherever it stands), a number, or `Ragged`; None allows all."""
    meaning: str = ""
    """What it holds, in words and with its unit."""
    required: bool = True
    """Whether a batch must have it."""

    def __str__(self) -> str:
        dtypes = self.dtype if isinstance(self.dtype, tuple) else (self.dtype,)
        dtype = "any dtype" if self.dtype is None else " or ".join(_dtype_name(dtype) for dtype in dtypes)
        return dtype if self.shape is None else f"{dtype} ({', '.join(map(str, self.shape))})"


class SchemaError(ValueError):
    """A batch that does not fit a schema: every problem, a line each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(
            "the batch does not fit its schema:\n" + "\n".join(f"  {problem}" for problem in self.problems)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,), self.__dict__


@dataclass(frozen=True)
class Schema:
    """Columns by name.

    >>> schema = Schema({"responses": Column(torch.int64, ("batch", "response")), "uid": Column(object, ("batch",))})
    >>> from kapell.protocol import DataProto
    >>> schema.check(DataProto.from_dict({"responses": torch.zeros(2, 5).long()}, {"uid": ["a", "b"]}))
    {'batch': 2, 'response': 5}
    """

    columns: Mapping[str, Column]
    """What must be there."""
    allow_extra: bool = True
    """Whether a batch may have further columns."""

    def check(self, batch: BatchContainer | StoredBatch | TensorDictBase) -> dict[str, int]:
        """Give the sizes of the named dimensions, or raise `SchemaError` with every problem.

        Of a batch by reference, only columns whose rows differ in length are fetched.
        """
        present = tuple(batch.keys()) if isinstance(batch, TensorDictBase) else batch.columns
        check = _Check()
        for name, column in self.columns.items():
            if name in present:
                check.column(name, column, _column_of(batch, name))
            elif column.required:
                check.problems.append(f"column {name!r}: expected {column}, but it is missing")
        if not self.allow_extra:
            check.problems += [f"column {name!r}: not expected" for name in present if name not in self.columns]
        if check.problems:
            raise SchemaError(check.problems)
        return {name: size for name, (size, _) in check.sizes.items()}

    def __str__(self) -> str:
        width = max((len(name) for name in self.columns), default=0)
        lines = (f"{name:{width}}  {column}  {column.meaning}".rstrip() for name, column in self.columns.items())
        return "\n".join(lines)


class _Check:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self.sizes: dict[str, tuple[int, str]] = {}  # by dimension: its size, and the column that said so first
        self._lengths: dict[str, tuple[torch.Tensor, str]] = {}

    def column(self, name: str, expected: Column, value: Any) -> None:
        if expected.dtype is not None and not _dtype_allowed(value, expected.dtype):
            self._problem(name, expected, value, "")
        if expected.shape is None:
            return
        shape = _shape_of(value)
        if len(shape) != len(expected.shape):
            self._problem(name, expected, value, f"; it has {len(shape)} dimensions, not {len(expected.shape)}")
            return
        for dim, (wanted, size) in enumerate(zip(expected.shape, shape, strict=True)):
            if why := self._dimension(name, dim, wanted, size, value):
                self._problem(name, expected, value, f"; {why}")

    def _dimension(self, name: str, dim: int, wanted: str | int | Ragged, size: int | None, value: Any) -> str:
        if isinstance(wanted, Ragged):
            return self._ragged(name, wanted.name, value) if size is None else f"dimension {dim} is not ragged"
        if size is None:
            return f"dimension {dim} is ragged"
        if isinstance(wanted, int):
            return "" if size == wanted else f"dimension {dim} is {size}, not {wanted}"
        known, since = self.sizes.setdefault(wanted, (size, name))
        return "" if known == size else f"{wanted} is {size} here and {known} in column {since!r}"

    def _ragged(self, name: str, dimension: str, value: torch.Tensor) -> str:
        lengths = parts_of(value)[1].diff()
        known, since = self._lengths.setdefault(dimension, (lengths, name))
        return "" if torch.equal(known, lengths) else f"lengths of {dimension} differ from those in column {since!r}"

    def _problem(self, name: str, expected: Column, value: Any, why: str) -> None:
        shape = ", ".join("~" if size is None else str(size) for size in _shape_of(value))
        self.problems.append(
            f"column {name!r}: expected {expected}, got {_dtype_name(_dtype_of(value))} ({shape}){why}"
        )


def _column_of(batch: BatchContainer | StoredBatch | TensorDictBase, name: str) -> Any:
    """Give a column, or in place of one in a store a column like it without values."""
    if isinstance(batch, TensorDictBase):
        return batch.get(name)
    stored = isinstance(batch, StoredBatch) and name in batch.stored_columns
    like_it = _without_values(batch.column_facts[name]) if stored else None
    return batch.column(name) if like_it is None else like_it


def _without_values(facts: ColumnFacts) -> Any:
    """Give a column of that dtype and shape; None where only the column itself tells them."""
    shape = [size for size in facts.shape if size is not None]
    if len(shape) < len(facts.shape):
        return None
    if facts.is_tensor:
        dtype = getattr(torch, facts.dtype, None)
        return torch.empty(shape, dtype=dtype, device="meta") if isinstance(dtype, torch.dtype) else None
    with suppress(TypeError, ValueError, SyntaxError):  # some dtypes, such as structured ones, have no name
        return np.broadcast_to(np.empty((), facts.dtype), shape)
    return None


def _shape_of(value: Any) -> tuple[int | None, ...]:
    """Give the shape, with None where it is ragged."""
    if isinstance(value, torch.Tensor) and is_jagged(value):
        values, _, ragged = parts_of(value)
        inner = [None if dim == ragged - 1 else size for dim, size in enumerate(values.shape)]
        return (value.shape[0], *inner)
    return tuple(value.shape)


def _dtype_of(value: Any) -> Any:
    return getattr(value, "dtype", None) or np.dtype(object)


def _dtype_allowed(value: Any, allowed: Any) -> bool:
    actual = _dtype_of(value)
    for dtype in allowed if isinstance(allowed, tuple) else (allowed,):
        if isinstance(dtype, torch.dtype) or isinstance(actual, torch.dtype):
            if dtype == actual:
                return True
        elif np.issubdtype(actual, dtype):
            return True
    return False


def _dtype_name(dtype: Any) -> str:
    return getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch.")
