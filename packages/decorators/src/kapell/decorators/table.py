"""A plan as a text table: rank, rows, padding, columns, bytes and replicas."""

from collections.abc import Sequence
from typing import Any

from kapell.decorators.arguments import PlannedArgument
from kapell.decorators.known_types import size_of
from kapell.decorators.splitting import splitter_of

__all__ = ["format_bytes", "format_table", "nbytes_of"]

_MAX_RANKS = 32  # a table of thousands of ranks hides what it should show


def format_table(
    title: str,
    ranks: Sequence[int],
    rows: Sequence[int],
    padding_rows: Sequence[int],
    columns: Sequence[str],
    arguments: Sequence[PlannedArgument],
) -> str:
    """The table that `print(plan)` shows, under a title."""
    sizes: dict[tuple[int, int], int] = {}
    shared = [_counts(argument.index, len(argument.values)) for argument in arguments]
    header = ["rank", "rows", "padding", "columns", "bytes", "replicas"]
    body = []
    for slot, rank in list(enumerate(ranks))[:_MAX_RANKS]:
        total = 0
        for which, argument in enumerate(arguments):
            key = (which, argument.index[slot])
            if key not in sizes:
                sizes[key] = nbytes_of(argument.values[argument.index[slot]])
            total += sizes[key]
        replicas = [
            f"{argument.label or argument.name or argument.position} x{counts[argument.index[slot]]}"
            for argument, counts in zip(arguments, shared, strict=True)
            if counts[argument.index[slot]] > 1
        ]
        shown = [", ".join(columns) or "-", format_bytes(total), ", ".join(replicas) or "-"]
        body.append([str(rank), str(rows[slot]), str(padding_rows[slot]), *shown])
    lines = [title, *_align([header, *body])]
    hidden = len(ranks) - len(body)
    if hidden:
        lines.append(f"... and {hidden} more ranks")
    return "\n".join(lines)


def nbytes_of(value: Any) -> int:
    """Size of an argument in bytes: exact for arrays and tensors, estimated for Python objects.

    >>> nbytes_of([b"x" * 1000]) - nbytes_of([b""])
    1000
    """
    splitter = splitter_of(value)
    if splitter is not None and splitter.nbytes is not None:
        return splitter.nbytes(value)
    return size_of(value)


def format_bytes(count: int) -> str:
    """A size for people.

    >>> format_bytes(12), format_bytes(64 * 2**20)
    ('12 B', '64.0 MiB')
    """
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def _counts(index: Sequence[int], size: int) -> list[int]:
    counts = [0] * size
    for which in index:
        counts[which] += 1
    return counts


def _align(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
