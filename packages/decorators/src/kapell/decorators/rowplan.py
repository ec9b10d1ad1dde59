"""Laying the rows of a call's arguments over shards: sizes, padding and balance."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kapell.decorators.balance import assign_rows
from kapell.decorators.futures import FuturePart, is_future
from kapell.decorators.rows import RowLayout, Shards
from kapell.decorators.spec import MethodSpec, Uneven
from kapell.decorators.splitter import Splitter
from kapell.decorators.splitting import splitter_of, values_of

__all__ = ["RowsPlan", "plan_rows"]


class RowsPlan(NamedTuple):
    """The distinct values of each argument: one a shard, or one for all."""

    values: tuple[Sequence[Any], ...]
    """For each argument, one value a shard, or a single one that every rank receives."""
    layout: RowLayout | None
    """Where the rows are; None when no argument has rows, or none is known yet."""
    padding_argument: tuple[int, ...] | None
    """Padding rows of each shard, for the method that wants to be told by a keyword."""


class _Batch(NamedTuple):
    label: str
    value: Any
    splitter: Splitter
    num_rows: int
    parts: Sequence[Any] | None
    """Of a type that offers chunk only."""


def plan_rows(
    method: str,
    spec: MethodSpec,
    arguments: list[tuple[str, Any]],
    *,
    num_shards: int,
    world_size: int,
    kept: Callable[[Any], Any],
) -> RowsPlan:
    """Lay the rows of all arguments that have rows over the shards; the others go whole to every rank.

    `kept` gives the part of a value that is sent, which need not have the columns that the rows are balanced by.
    """
    found: dict[int, _Batch] = {}
    futures: set[int] = set()
    for place, (label, value) in enumerate(arguments):
        splitter = splitter_of(value)
        if is_future(value) and (splitter is None or not _knows_its_rows(value)):
            futures.add(place)
        elif splitter is not None:
            parts = _chunks(method, label, splitter, kept(value), num_shards) if splitter.take is None else None
            found[place] = _Batch(label, value, splitter, splitter.length(value), parts)
    batches = list(found.values())
    layout = _layout(method, spec, batches, num_shards, world_size) if batches else None
    if futures and num_shards > 1 and _needs_rows(spec, layout):
        raise ValueError(
            f"{method}: argument {arguments[min(futures)][0]!r} is a future whose rows are not known yet; this call "
            "pads, balances, groups or refuses by them. Wait for it first: .get()"
        )
    values: list[Sequence[Any]] = []
    for place, (_, value) in enumerate(arguments):
        if place in found:
            assert layout is not None
            batch = found[place]
            values.append(Shards(kept(value), batch.splitter, layout) if batch.parts is None else batch.parts)
        elif place in futures:
            values.append(_future_parts(value, num_shards))
        else:
            values.append((value,))
    told = None
    if spec.padding_argument is not None:
        told = (0,) * num_shards if layout is None else layout.padding
    return RowsPlan(tuple(values), layout, told)


def _needs_rows(spec: MethodSpec, layout: RowLayout | None) -> bool:
    """Whether the rows of every argument decide how the call is laid out."""
    if layout is not None:
        return layout.order is not None or layout.padded_size is not None
    return spec.balance_by is not None or spec.group_by is not None or spec.uneven is not Uneven.SHARDS


def _knows_its_rows(future: Any) -> bool:
    """Whether the length can be asked; a future with `num_rows` says None there as long as nobody knows."""
    if hasattr(type(future), "num_rows"):
        return future.num_rows is not None
    return hasattr(type(future), "__len__")


def _future_parts(future: Any, num_shards: int) -> Sequence[Any]:
    if callable(getattr(future, "chunk", None)):
        return tuple(future.chunk(num_shards))
    return tuple(FuturePart(future, shard, num_shards) for shard in range(num_shards))


def _chunks(method: str, label: str, splitter: Splitter, value: Any, num_shards: int) -> Sequence[Any]:
    assert splitter.chunk is not None
    parts = tuple(splitter.chunk(value, num_shards))
    if len(parts) != num_shards:
        raise ValueError(
            f"{method}: chunk({num_shards}) of argument {label!r} ({splitter.kind}, {splitter.length(value)} rows) "
            f"gave {len(parts)} parts"
        )
    return parts


def _layout(method: str, spec: MethodSpec, batches: list[_Batch], num_shards: int, world_size: int) -> RowLayout:
    num_rows = batches[0].num_rows
    if len(batches) > 1 and any(batch.num_rows != num_rows for batch in batches):
        found = ", ".join(f"{batch.label!r} has {batch.num_rows} rows" for batch in batches)
        raise ValueError(
            f"{method}: arguments of different lengths cannot be split together: {found}; "
            "wrap what every rank should get whole in Replicate(...)"
        )
    if spec.balance_by is None and spec.group_by is None:
        layout = RowLayout.even(num_rows, num_shards)
    else:
        layout = _balanced(method, spec, batches, num_rows, num_shards)
    for batch in batches:
        if batch.parts is not None:
            layout = _as_chunked(method, batch, batch.parts, layout, alone=len(batches) == 1)
    return _padded(method, spec, batches, layout, world_size)


def _as_chunked(method: str, batch: _Batch, parts: Sequence[Any], layout: RowLayout, *, alone: bool) -> RowLayout:
    """The layout by which a type that offers chunk only was cut; other arguments must be cut at the same rows."""
    sizes = tuple(batch.splitter.length(part) for part in parts)
    if layout.order is None and (alone or sizes == layout.sizes):
        return RowLayout(sizes)
    raise ValueError(
        f"{method}: {batch.splitter.kind} offers chunk only and cuts argument {batch.label!r} at {list(sizes)} "
        f"rows; this call needs {list(layout.sizes)}{' in another order' if layout.order is not None else ''}"
    )


def _padded(method: str, spec: MethodSpec, batches: list[_Batch], layout: RowLayout, world_size: int) -> RowLayout:
    size = max(layout.sizes)
    if size == min(layout.sizes):
        return layout
    num_shards = len(layout.sizes)
    asked = spec.uneven is Uneven.PAD or any(_asks_for_padding(batch.value) for batch in batches)
    if not asked:
        if spec.uneven is Uneven.REFUSE:
            raise ValueError(
                f"{method}: {layout.num_rows} rows cannot be split into {num_shards} equal shards (data-parallel size "
                f"{num_shards}, world size {world_size}); send a multiple of {num_shards} rows, or register with "
                "uneven='shards' or uneven='pad'"
            )
        return layout
    for batch in batches:
        if batch.splitter.take is None:
            raise TypeError(
                f"{method}: {batch.splitter.kind} offers chunk only: argument {batch.label!r} cannot be padded"
            )
    if spec.padding_argument is None and all(batch.splitter.pad is None for batch in batches):
        raise TypeError(
            f"{method}: {batches[0].splitter.kind} has no place to mark padded rows; register with "
            "padding_argument='num_padding' to receive their number, or with uneven='shards'"
        )
    return RowLayout(layout.sizes, layout.order, padded_size=size)


def _asks_for_padding(value: Any) -> bool:
    """Whether the batch itself says so, verl's way."""
    enabled = getattr(value, "is_padding_enabled", None)
    return bool(enabled()) if callable(enabled) else False


def _balanced(method: str, spec: MethodSpec, batches: list[_Batch], num_rows: int, num_shards: int) -> RowLayout:
    costs: list[Any] = [1] * num_rows
    if isinstance(spec.balance_by, str):
        costs = _row_costs(_column(method, batches, spec.balance_by, "balance_by"))
    elif spec.balance_by is not None:
        costs = values_of(spec.balance_by(batches[0].value))
    groups = values_of(_column(method, batches, spec.group_by, "group_by")) if spec.group_by is not None else None
    if len(costs) != num_rows:
        raise ValueError(f"{method}: balance_by gave {len(costs)} costs for {num_rows} rows")
    parts = assign_rows(costs, groups, num_shards)
    order = array("q")
    for part in parts:
        order.extend(part)
    return RowLayout(tuple(len(part) for part in parts), order)


def _column(method: str, batches: list[_Batch], name: str, option: str) -> Any:
    for batch in batches:
        splitter = batch.splitter
        if (
            splitter.columns is not None
            and splitter.column is not None
            and name in tuple(splitter.columns(batch.value))
        ):
            return splitter.column(batch.value, name)
    raise ValueError(f"{method}: {option}={name!r} names a column that no argument of the call has")


def _row_costs(column: Any) -> list[Any]:
    """One number a row; a column with more dimensions counts its sum."""
    if getattr(column, "is_nested", False):
        return [float(row.sum()) for row in column.unbind()]
    while getattr(column, "ndim", 1) > 1:
        column = column.sum(-1)
    return list(values_of(column))
