"""What can be split over ranks and joined again: one registry, and a structural protocol for batch types.

A type takes part when it was registered (`register_splitter`), or when it has `__len__`, `chunk(n)` and
`concat(parts)`. With `select_idxs` it can also be balanced, and be cut by `slice` or at all bounds by `split_at`; with
`padding`, `padding_mask` and `without_padding` it can be padded; with `columns` and `select`, only the columns that a
method reads are sent.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kapell.decorators import batches
from kapell.decorators.known_types import KNOWN_SPLITTERS
from kapell.decorators.splitter import Splitter, always, never

__all__ = ["lookup_splitter", "num_splitters", "register_splitter", "splitter_of", "values_of"]

_SPLITTERS: dict[type | str, Splitter] = dict(KNOWN_SPLITTERS)
_CACHE: dict[type, Splitter | None] = {}


def register_splitter(
    cls: type | str,
    *,
    length: Callable[[Any], int],
    join: Callable[[list[Any]], Any],
    take: Callable[[Any, Sequence[int]], Any] | None = None,
    cut: Callable[[Any, int, int], Any] | None = None,
    split: Callable[[Any, Sequence[int]], Sequence[Any]] | None = None,
    chunk: Callable[[Any, int], Sequence[Any]] | None = None,
    has_rows: Callable[[Any], bool] = always,
    columns: Callable[[Any], Iterable[str]] | None = None,
    select: Callable[[Any, Sequence[str]], Any] | None = None,
    column: Callable[[Any, str], Any] | None = None,
    nbytes: Callable[[Any], int] | None = None,
    pad: Callable[[Any, int], Any] | None = None,
    marked: Callable[[Any], int] = never,
    unpad: Callable[[Any], Any] | None = None,
) -> None:
    """Let values of `cls` and its subclasses be split over ranks; `Splitter` says what each function does.

    `cls` is the type, or its `__module__` and `__qualname__` as "module.Name" where it should not be imported for
    this. A type that is registered already is refused.

    >>> class Rows:
    ...     def __init__(self, items): self.items = items
    >>> register_splitter(Rows, length=lambda r: len(r.items), take=lambda r, i: Rows([r.items[k] for k in i]),
    ...                   join=lambda parts: Rows([item for part in parts for item in part.items]))
    >>> splitter_of(Rows([1, 2])).length(Rows([1, 2]))
    2
    """
    name = cls if isinstance(cls, str) else _dotted(cls)
    if cls in _SPLITTERS or name in _SPLITTERS:
        raise ValueError(f"a splitter for {name} is already registered")
    _SPLITTERS[cls] = Splitter(
        kind=name.rpartition(".")[2],
        length=length,
        join=join,
        take=take,
        cut=cut,
        split=split,
        chunk=chunk,
        has_rows=has_rows,
        columns=columns,
        select=select,
        column=column,
        nbytes=nbytes,
        pad=pad,
        marked=marked,
        unpad=unpad,
    )
    _CACHE.clear()


def num_splitters() -> int:
    """How many types are registered; grows when what is known of a type may have changed."""
    return len(_SPLITTERS)


def lookup_splitter(cls: type) -> Splitter | None:
    """The splitter of a type, or None: registered for it or its nearest base, else by its structure."""
    if cls not in _CACHE:
        _CACHE[cls] = _find(cls)
    return _CACHE[cls]


def splitter_of(value: Any) -> Splitter | None:
    """The splitter of a value, or None if it has no rows to split.

    >>> splitter_of([1, 2]).kind, splitter_of("text")
    ('list', None)
    """
    try:
        splitter = _CACHE[type(value)]
    except KeyError:
        splitter = lookup_splitter(type(value))
    if splitter is None or splitter.has_rows is always or splitter.has_rows(value):
        return splitter
    return None


def values_of(column: Any) -> list[Any]:
    """The entries of one column as Python objects."""
    return list(column.tolist() if hasattr(column, "tolist") else column)


def _find(cls: type) -> Splitter | None:
    for base in cls.__mro__:
        splitter = _SPLITTERS.get(base) or _SPLITTERS.get(_dotted(base))
        if splitter is not None:
            return splitter
    return _structural(cls)


def _dotted(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _structural(cls: type) -> Splitter | None:
    """A splitter for a batch type of the caller's own, from the methods that it has."""
    if not all(callable(getattr(cls, name, None)) for name in ("__len__", "chunk", "concat")):
        return None
    by_position = hasattr(cls, "select_idxs")
    has_columns = hasattr(cls, "columns")
    marks = by_position and all(hasattr(cls, name) for name in ("padding", "without_padding"))
    return Splitter(
        kind=cls.__name__,
        length=len,
        join=cls.concat,  # ty: ignore[missing-attribute]
        take=batches.take if by_position else None,
        cut=batches.cut if by_position and hasattr(cls, "slice") else None,
        split=batches.split if by_position and hasattr(cls, "split_at") else None,
        chunk=batches.chunk,
        columns=batches.columns if has_columns else None,
        select=batches.select if has_columns and hasattr(cls, "select") else None,
        column=batches.column if has_columns else None,
        nbytes=batches.nbytes,
        pad=batches.pad if marks else None,
        marked=batches.marked if marks else never,
        unpad=batches.unpad if marks else None,
    )
