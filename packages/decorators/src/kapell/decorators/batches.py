"""Reading a batch type through its structure: the methods that kapell.protocol's DataProto and its like share.

Nothing here imports such a type. A batch may hold its columns in two parts, `batch` and `non_tensor_batch`, and
notes for the whole batch in `meta_info`.
"""

from collections.abc import Sequence
from typing import Any

__all__ = ["PADDING_KEY", "chunk", "column", "columns", "cut", "mark", "marked", "nbytes", "select", "take"]

PADDING_KEY = "padding_rows"
"""Key of `meta_info` under which a worker finds how many rows at the end of its batch are padding."""


def take(batch: Any, positions: Sequence[int]) -> Any:
    """The rows at `positions`."""
    return batch.select_idxs(list(positions))


def cut(batch: Any, start: int, stop: int) -> Any:
    """The rows `start:stop`."""
    return batch.slice(start, stop)


def chunk(batch: Any, count: int) -> Sequence[Any]:
    """The batch's own parts."""
    return batch.chunk(count)


def columns(batch: Any) -> tuple[str, ...]:
    """Names of the columns; `columns` may be an attribute or a method."""
    names = batch.columns
    return tuple(names() if callable(names) else names)


def select(batch: Any, names: Sequence[str]) -> Any:
    """The batch with only the named columns and all of `meta_info`."""
    tensors = getattr(batch, "batch", None)
    objects = getattr(batch, "non_tensor_batch", None)
    if objects is None and not hasattr(batch, "batch"):
        return batch.select(list(names))
    in_tensors = set(tensors.keys()) if tensors is not None else set()
    return batch.select(
        batch_keys=[name for name in names if name in in_tensors],
        non_tensor_batch_keys=[name for name in names if name in (objects or {})],
    )


def column(batch: Any, name: str) -> Any:
    """One column."""
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


def mark(batch: Any, padding: int) -> Any:
    """The batch with the number of padding rows at its end in `meta_info`; 0 takes the note away."""
    kept = {key: value for key, value in batch.meta_info.items() if key != PADDING_KEY}
    marked_batch = batch.slice(0, len(batch)) if hasattr(batch, "slice") else batch.select_idxs(list(range(len(batch))))
    marked_batch.meta_info = kept | {PADDING_KEY: padding} if padding else kept
    return marked_batch


def marked(batch: Any) -> int:
    """How many rows at the end of the batch are noted as padding."""
    return int((getattr(batch, "meta_info", None) or {}).get(PADDING_KEY, 0))
