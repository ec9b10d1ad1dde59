"""A plan as a text table: rank, rows, padding, columns, bytes and replicas."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kapell.decorators.splitting import splitter_of

if TYPE_CHECKING:
    from kapell.decorators.plan import DispatchPlan

__all__ = ["format_bytes", "format_plan", "nbytes_of"]

_MAX_RANKS = 32  # a table of thousands of ranks hides what it should show


def format_plan(plan: "DispatchPlan") -> str:
    """The table that `print(plan)` shows."""
    num_rows = sum(rows for rank, rows in zip(plan.ranks, plan.rows, strict=True) if rank in set(plan.collect_ranks))
    title = f"{plan.method}: {plan.mode}, {num_rows} rows, {len(plan.ranks)} of {plan.world_size} ranks run"
    sizes: dict[tuple[int, int], int] = {}
    shared = [_counts(argument.index, len(argument.values)) for argument in plan.arguments]
    header = ["rank", "rows", "padding", "columns", "bytes", "replicas"]
    body = []
    for slot, rank in list(enumerate(plan.ranks))[:_MAX_RANKS]:
        total = 0
        for which, argument in enumerate(plan.arguments):
            key = (which, argument.index[slot])
            if key not in sizes:
                sizes[key] = nbytes_of(argument.values[argument.index[slot]])
            total += sizes[key]
        replicas = [
            f"{argument.label or argument.name or argument.position} x{counts[argument.index[slot]]}"
            for argument, counts in zip(plan.arguments, shared, strict=True)
            if counts[argument.index[slot]] > 1
        ]
        shown = [", ".join(plan.columns) or "-", format_bytes(total), ", ".join(replicas) or "-"]
        body.append([str(rank), str(plan.rows[slot]), str(plan.padding_rows[slot]), *shown])
    lines = [title, *_align([header, *body])]
    hidden = len(plan.ranks) - len(body)
    if hidden:
        lines.append(f"... and {hidden} more ranks")
    return "\n".join(lines)


def nbytes_of(value: Any) -> int:
    """Size of an argument in bytes as far as its type says it; 0 where it doesn't.

    >>> nbytes_of(None)
    0
    """
    splitter = splitter_of(value)
    if splitter is not None and splitter.nbytes is not None:
        return splitter.nbytes(value)
    own = getattr(value, "nbytes", 0)
    return own if isinstance(own, int) else 0


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
