"""What a batch does with its columns: select, pop, rename, union."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, Self

from tensordict import TensorDict

from kapell.protocol.columns import cut, num_rows
from kapell.protocol.container import BatchContainer
from kapell.protocol.meta import copy_meta, union_meta
from kapell.protocol.unions import union_columns

__all__ = ["ColumnOperations", "only"]


class ColumnOperations(BatchContainer):
    """Operations by column name. Results share tensor memory with their source; their containers are their own."""

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """Keep the named columns and ``meta_info`` keys; None keeps all of that part."""
        tensors = None if self._tensors is None else self.tensor_columns()
        chosen = self._like(
            _picked("tensor column", tensors, batch_keys),
            _picked("non-tensor column", self.non_tensor_batch, non_tensor_batch_keys) or {},
            len(self),
        )
        chosen.meta_info = copy_meta(_picked("meta_info key", self.meta_info, meta_info_keys))
        chosen._padded = self._padded
        return copy.deepcopy(chosen) if deepcopy else chosen

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> Self:
        """Take the named columns and ``meta_info`` keys out of this batch, which changes it, or change nothing."""
        wanted = [list(keys or ()) for keys in (batch_keys, non_tensor_batch_keys, meta_info_keys)]
        rows = len(self)
        popped = self.select(wanted[0] if self.batch is not None or wanted[0] else None, wanted[1], wanted[2])
        if self.batch is not None:
            kept = {name: column for name, column in self.batch.items() if name not in wanted[0]}
            self.batch = TensorDict(kept, batch_size=[rows], device=self.batch.device)
            popped.batch = popped.batch if wanted[0] else None
        self.non_tensor_batch = _without(self.non_tensor_batch, wanted[1])
        self.meta_info = _without(self.meta_info, wanted[2])
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Give columns, tensor or not, other names."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise ValueError(f"old_keys and new_keys must have the same length, got {len(old)} and {len(new)}")
        for name in old:
            self.column(name)
        names = dict(zip(old, new, strict=True))
        result = [names.get(name, name) for name in self.columns]
        if twice := sorted({name for name in result if result.count(name) > 1}):
            raise ValueError(f"renaming would give two columns the name {twice[0]!r}")
        tensors = None if self.batch is None else {names.get(key, key): column for key, column in self.batch.items()}
        arrays = {names.get(key, key): column for key, column in self.non_tensor_batch.items()}
        renamed = self._like(tensors, arrays, len(self))
        renamed._padded = self._padded
        return renamed

    def union(self, other: Any) -> Self:
        """Give a batch with the columns and ``meta_info`` of both; what both have must be the same (NaN equals NaN).

        With a `StoredBatch` it is one, too.
        """
        if (onto := getattr(other, "union_onto", None)) is not None:
            return onto(self)
        rows = _common_rows(self, other)
        tensors = union_columns(self.batch, other.batch)
        arrays = union_columns(self.non_tensor_batch, other.non_tensor_batch)
        meta = union_meta(self.meta_info, other.meta_info)
        no_tensors = self.batch is None and other.batch is None
        device = next((part.batch.device for part in (self, other) if part.batch is not None), None)
        merged = type(self)(
            batch=None if no_tensors else TensorDict(tensors, batch_size=[rows], device=device),
            non_tensor_batch=arrays,
            meta_info=meta,
        )
        merged._padded = self._padded if self._padded is not None else getattr(other, "_padded", None)
        return merged

    def __or__(self, other: object) -> Self:
        is_batch = isinstance(other, BatchContainer) or hasattr(other, "union_onto")
        return self.union(other) if is_batch else NotImplemented

    def to(self, device: Any) -> Self:
        """Give a batch whose tensors are on ``device``."""
        moved = self._map(lambda column: cut(column, 0, num_rows(column)), len(self))
        moved.batch = None if self.batch is None else self.batch.to(device)
        return moved


def only(batch: Any, names: Sequence[str], *, meta: bool = True) -> Any:
    """Give a batch with the named columns, tensors or not, and with its ``meta_info`` unless ``meta`` is false."""
    for name in names:
        if name not in batch.columns:
            batch.column(name)  # says which there are
    arrays = [name for name in names if name in batch.non_tensor_batch]
    tensors = [name for name in names if name not in batch.non_tensor_batch]
    return batch.select(tensors, arrays, None if meta else [])


def _picked(what: str, available: dict[str, Any] | None, keys: Iterable[str] | None) -> dict[str, Any] | None:
    if keys is None:
        return available
    keys = [keys] if isinstance(keys, str) else list(keys)
    for key in keys:
        if available is None or key not in available:
            raise KeyError(f"no {what} {key!r}; there are {sorted(available or {})}")
    return None if available is None else {key: available[key] for key in keys}


def _without(entries: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: entry for name, entry in entries.items() if name not in set(names)}


def _common_rows(left: BatchContainer, right: BatchContainer) -> int:
    if not isinstance(right, BatchContainer):
        raise TypeError(f"a batch is united with another batch, got {type(right).__name__}")
    with_columns = [part for part in (left, right) if part.columns or len(part)]
    if len(with_columns) == 2 and len(left) != len(right):
        raise ValueError(
            f"cannot unite a batch of {len(left)} rows with one of {len(right)} rows; "
            "repeat the smaller one first (interleaved, if it holds prompts and the other their answers)"
        )
    return len(with_columns[0]) if with_columns else 0
