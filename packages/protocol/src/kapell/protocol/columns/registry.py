"""The kinds of columns, and the row operations that find the right one.

A kind knows the rows of its columns: how many there are, taking rows (a copy), cutting a range of rows (a view),
joining columns, reading one row, and the bytes. Everything that a batch does with rows is made of these, so no two
columns of a batch can be cut by different rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

__all__ = [
    "ColumnKind",
    "cell",
    "cut",
    "join",
    "kind_of",
    "num_bytes",
    "num_rows",
    "require_one",
    "split",
    "take",
    "use_kinds",
]


class ColumnKind(Protocol):
    """What a kind of column must offer."""

    name: str
    """What messages call it."""

    def accepts(self, column: Any) -> bool:
        """Say whether a value is a column of this kind."""
        ...

    def num_rows(self, column: Any) -> int:
        """Count rows."""
        ...

    def take(self, column: Any, rows: np.ndarray) -> Any:
        """Copy rows in the given order."""
        ...

    def cut(self, column: Any, start: int, stop: int) -> Any:
        """View a range of rows."""
        ...

    def split(self, column: Any, bounds: Sequence[int]) -> Sequence[Any]:
        """View the ranges between neighbouring bounds."""
        ...

    def join(self, columns: Sequence[Any]) -> Any:
        """Join columns row after row."""
        ...

    def cell(self, column: Any, row: int) -> Any:
        """Read one row."""
        ...

    def num_bytes(self, column: Any) -> int:
        """Weigh the column."""
        ...


_KINDS: list[ColumnKind] = []
_ALWAYS: dict[type, ColumnKind] = {}  # types of which every value is of one kind, as far as they have been met

# A dense piece is a jagged one whose rows happened to have equal lengths; a shared value is one for each row.
_WIDER = {
    frozenset({"tensor", "jagged tensor"}): "jagged tensor",
    frozenset({"shared value", "non-tensor stack"}): "non-tensor stack",
}


def use_kinds(kinds: Iterable[ColumnKind]) -> None:
    """Say which kinds there are; they are asked in this order."""
    _KINDS[:] = kinds
    _ALWAYS.clear()


def kind_of(column: Any) -> ColumnKind:
    """Find the kind of a column."""
    kind = _ALWAYS.get(type(column))
    if kind is not None:
        return kind
    for kind in _KINDS:
        if kind.accepts(column):
            if type(column) is np.ndarray:
                _ALWAYS[np.ndarray] = kind
            return kind
    names = ", ".join(kind.name for kind in _KINDS)
    raise TypeError(f"{type(column).__name__} cannot be a column; columns are: {names}")


def num_rows(column: Any) -> int:
    """Count rows."""
    return int(kind_of(column).num_rows(column))


def take(column: Any, rows: np.ndarray) -> Any:
    """Copy the rows with these numbers (int64, not negative), in this order."""
    return kind_of(column).take(column, rows)


def cut(column: Any, start: int, stop: int) -> Any:
    """Give rows ``start`` to ``stop``; they share memory with the column where its kind can."""
    return kind_of(column).cut(column, start, stop)


def split(column: Any, bounds: Sequence[int]) -> Sequence[Any]:
    """Cut at all ``bounds`` (row numbers, not falling), as `cut` does at two."""
    return kind_of(column).split(column, bounds)


def cell(column: Any, row: int) -> Any:
    """Read one row."""
    return kind_of(column).cell(column, row)


def num_bytes(column: Any) -> int:
    """Weigh a column: exact for numbers, estimated from a few cells for Python objects."""
    return kind_of(column).num_bytes(column)


def join(columns: Sequence[Any], name: str) -> Any:
    """Join columns row after row. Pieces without rows don't take part unless all are so."""
    if len(columns) == 1:
        return columns[0]
    kind = kind_of(columns[0])
    types = set(map(type, columns))
    if len(types) == 1 and (types <= _ALWAYS.keys() or all(map(kind.accepts, columns))):
        with suppress(ValueError, TypeError):  # pieces that differ: perhaps only those without rows, else told below
            return kind.join(columns)
    found = [(column, kind_of(column)) for column in columns]
    found = [(column, kind) for column, kind in found if kind.num_rows(column)] or found[:1]
    kinds = {kind.name: kind for _, kind in found}
    pieces = [column for column, _ in found]
    try:
        wider = _WIDER.get(frozenset(kinds))
        if wider is not None:
            return kinds[wider].join(pieces)
        require_one("kind", sorted(kinds))
        return found[0][1].join(pieces)
    except (ValueError, TypeError) as error:
        raise type(error)(f"cannot join column {name!r}: {error}") from error


def require_one(what: str, values: Sequence[Any]) -> None:
    """Check that all pieces agree."""
    for value in values[1:]:
        if value != values[0]:
            raise ValueError(f"pieces differ in {what}: {values[0]} and {value}")
