"""Reading a batch type through its structure: the methods that kapell.protocol's DataProto and its like share.

Nothing here imports such a type. A batch may hold its columns in two parts, `batch` and `non_tensor_batch`.
"""

import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["chunk", "column", "columns", "cut", "marked", "nbytes", "pad", "select", "split", "take", "unpad"]


def take(batch: Any, positions: Sequence[int]) -> Any:
    """The rows at `positions`."""
    numpy = sys.modules.get("numpy")
    return batch.select_idxs(list(positions) if numpy is None else numpy.asarray(positions, dtype="int64"))


def cut(batch: Any, start: int, stop: int) -> Any:
    """The rows `start:stop`."""
    return batch.slice(start, stop)


def split(batch: Any, bounds: Sequence[int]) -> Sequence[Any]:
    """The rows between neighbouring bounds."""
    return batch.split_at(bounds)


def chunk(batch: Any, count: int) -> Sequence[Any]:
    """The batch's own parts."""
    return batch.chunk(count)


def columns(batch: Any) -> tuple[str, ...]:
    """Names of the columns; `columns` may be an attribute or a method."""
    names = batch.columns
    return tuple(names() if callable(names) else names)


def select(batch: Any, names: Sequence[str]) -> Any:
    """The batch with only the named columns."""
    objects = getattr(batch, "non_tensor_batch", None)
    if objects is None and not hasattr(batch, "batch"):
        return batch.select(list(names))
    return batch.select(
        batch_keys=[name for name in names if name not in (objects or {})],
        non_tensor_batch_keys=[name for name in names if name in (objects or {})],
    )


def column(batch: Any, name: str) -> Any:
    """One column."""
    if hasattr(batch, "column"):
        return batch.column(name)
    for part in (getattr(batch, "batch", None), getattr(batch, "non_tensor_batch", None)):
        if part is not None and name in part.keys():  # noqa: SIM118 (a TensorDict has no `in`)
            return part[name]
    return batch[name]


def nbytes(batch: Any) -> int:
    """Bytes of the columns that say their size."""
    own = getattr(batch, "nbytes", None)
    if isinstance(own, int):
        return own
    if not hasattr(batch, "columns"):
        return 0
    return sum(int(getattr(column(batch, name), "nbytes", 0)) for name in columns(batch))


def pad(batch: Any, count: int) -> Any:
    """The batch with `count` copies of its last row, marked in `padding_mask`."""
    padded = take(batch, range(len(batch)))
    padded.padding(count)
    return padded


def marked(batch: Any) -> int:
    """How many rows are marked as padding."""
    mask = batch.padding_mask
    return int(mask.sum() if hasattr(mask, "sum") else sum(mask))


def unpad(batch: Any) -> Any:
    """The batch without the rows that are marked as padding."""
    return batch.without_padding()
