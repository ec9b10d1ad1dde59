"""How one type takes part in dispatch: the functions that measure, cut and join its values."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Splitter", "always", "never"]


def always(value: Any) -> bool:
    """Every value has rows."""
    return True


def never(value: Any) -> int:
    """No value notes padding."""
    return 0


@dataclass(frozen=True, kw_only=True)
class Splitter:
    """How one type is measured, cut and joined. Functions must not change the value they are given."""

    kind: str
    """Name in messages."""
    length: Callable[[Any], int]
    """Number of rows."""
    join: Callable[[list[Any]], Any]
    """One value from parts, rows in order; a part may have no rows."""
    take: Callable[[Any, Sequence[int]], Any] | None = None
    """The rows at the given positions, in that order, with repeats. None for a type that offers `chunk` only."""
    cut: Callable[[Any, int, int], Any] | None = None
    """Rows `start:stop`; by default `take` of that range."""
    split: Callable[[Any, Sequence[int]], Sequence[Any]] | None = None
    """The ranges of rows between neighbouring bounds, all at once; by default `cut` of each."""
    chunk: Callable[[Any, int], Sequence[Any]] | None = None
    """Exactly n parts, for a type without `take`."""
    has_rows: Callable[[Any], bool] = always
    """False for a value of this type without rows, such as a 0-d tensor: it is passed whole."""
    columns: Callable[[Any], Iterable[str]] | None = None
    """Names of the columns; None for a type without named columns."""
    select: Callable[[Any, Sequence[str]], Any] | None = None
    """The value with only these columns."""
    column: Callable[[Any, str], Any] | None = None
    """One column, for costs and groups."""
    nbytes: Callable[[Any], int] | None = None
    """Size in bytes, for the plan's table."""
    pad: Callable[[Any, int], Any] | None = None
    """The value with its last row repeated so many times at the end, noted as padding where the worker can read it."""
    marked: Callable[[Any], int] = never
    """How many rows are noted as padding."""
    unpad: Callable[[Any], Any] | None = None
    """The value without the rows that are noted as padding."""

    def __post_init__(self) -> None:
        if self.take is None and self.chunk is None:
            raise ValueError(f"a splitter for {self.kind} needs take=... (rows by position) or chunk=... (n parts)")
