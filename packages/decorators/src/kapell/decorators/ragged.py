"""Rows of jagged nested tensors, the layout of columns whose rows differ in length; torch is not imported for it.

The ragged dimension is read from the tensor, never from the lengths: equal lengths by chance change nothing.
"""

import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

__all__ = ["cut", "join", "lengths", "take"]


def lengths(nested: Any) -> list[int]:
    """Length of each row along the ragged dimension."""
    if nested.lengths() is not None:
        return nested.lengths().tolist()
    return nested.offsets().diff().tolist()


def cut(nested: Any, start: int, stop: int) -> Any:
    """Rows `start:stop`, as a view of the same values where there are no holes."""
    if nested.lengths() is not None:
        return take(nested, range(start, stop))
    ends = nested.offsets()[start : stop + 1]
    first, last = int(ends[0]), int(ends[-1])
    values = nested.values().narrow(nested._ragged_idx - 1, first, last - first)
    return _build(values, ends - first, nested._ragged_idx)


def take(nested: Any, positions: Sequence[int]) -> Any:
    """The rows at `positions`, copied."""
    starts, sizes = nested.offsets().tolist(), lengths(nested)
    values, dim = nested.values(), nested._ragged_idx - 1
    rows = [values.narrow(dim, starts[position], sizes[position]) for position in positions]
    joined = sys.modules["torch"].cat(rows, dim=dim) if rows else values.narrow(dim, 0, 0)
    return _build(joined, _offsets([sizes[position] for position in positions], nested), nested._ragged_idx)


def join(parts: list[Any]) -> Any:
    """One nested tensor with the rows of all parts in order."""
    parts = [take(part, range(int(part.size(0)))) if part.lengths() is not None else part for part in parts]
    dims = sorted({part._ragged_idx for part in parts})
    if len(dims) > 1:
        raise ValueError(f"cannot join nested tensors whose ragged dimensions differ: {dims}")
    values = sys.modules["torch"].cat([part.values() for part in parts], dim=dims[0] - 1)
    return _build(values, _offsets([size for part in parts for size in lengths(part)], parts[0]), dims[0])


def _offsets(sizes: list[int], like: Any) -> Any:
    torch = sys.modules["torch"]
    return torch.tensor([0, *accumulate(sizes)], dtype=like.offsets().dtype, device=like.device)


def _build(values: Any, offsets: Any, ragged_dim: int) -> Any:
    sizes = offsets.diff()
    # Without the longest size torch pads to that of the first dimension of `values`, which cuts rows short.
    shortest, longest = (int(sizes.min()), int(sizes.max())) if len(sizes) else (0, 0)
    return sys.modules["torch"].nested.nested_tensor_from_jagged(
        values, offsets=offsets, jagged_dim=ragged_dim, min_seqlen=shortest, max_seqlen=longest
    )
