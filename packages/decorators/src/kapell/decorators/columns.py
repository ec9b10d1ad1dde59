"""Declared columns: what a method reads is there before anything is sent, and what it writes was announced."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from kapell.decorators.spec import spec_of
from kapell.decorators.splitting import splitter_of

__all__ = ["check_read", "check_written", "columns_of", "known_writers", "only"]


def columns_of(value: Any) -> tuple[str, ...] | None:
    """Names of a batch's columns; None for a value without named columns."""
    splitter = splitter_of(value)
    return tuple(splitter.columns(value)) if splitter is not None and splitter.columns is not None else None


def only(value: Any, reads: Iterable[str]) -> Any:
    """A batch with the columns among `reads`; any other value, and a batch that cannot select, as it is."""
    splitter = splitter_of(value)
    if splitter is None or splitter.columns is None or splitter.select is None:
        return value
    there = tuple(splitter.columns(value))
    wanted = set(reads)
    kept = [name for name in there if name in wanted]
    return value if len(kept) == len(there) else splitter.select(value, kept)


def check_read(method: str, reads: tuple[str, ...], there: set[str], writers: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse a call whose batches lack a column that the method reads."""
    for name in reads:
        if name in there:
            continue
        known = writers.get(name, ())
        who = f"it could have been written by {' or '.join(known)}" if known else "no known method writes it"
        close = difflib.get_close_matches(name, there, n=1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(
            f"{method} reads column {name!r}, which the batch does not have{meant}; {who}. "
            f"The batch has: {', '.join(sorted(there)) or 'no columns'}"
        )


def check_written(method: str, rank: int, output: Any, writes: tuple[str, ...], sent: tuple[str, ...]) -> None:
    """Refuse a result with columns that were neither declared nor sent."""
    there = columns_of(output)
    undeclared = sorted(set(there or ()) - set(writes) - set(sent))
    if undeclared:
        raise ValueError(
            f"{method}: rank {rank} returned columns that it does not declare: {', '.join(undeclared)}; "
            f"declared: writes={writes}. Add them to writes=, or leave them out of the result"
        )


def known_writers(workers: Mapping[str, type]) -> dict[str, tuple[str, ...]]:
    """Column -> the methods that declare to write it, for `GroupShape.writers`.

    `workers` maps the role's name to its class.

    >>> from kapell.decorators import Dispatch, register
    >>> class Critic:
    ...     @register(Dispatch.DP_COMPUTE_PROTO, writes=["values"])
    ...     def compute_values(self, batch): return batch
    >>> known_writers({"critic": Critic})
    {'values': ('critic.compute_values',)}
    """
    writers: dict[str, tuple[str, ...]] = {}
    for role, cls in workers.items():
        for name in dir(cls):
            spec = spec_of(getattr(cls, name, None))
            for column in spec.writes if spec is not None else ():
                writers[column] = (*writers.get(column, ()), f"{role}.{name}")
    return writers
