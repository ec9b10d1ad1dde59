"""A batch type that the package has never heard of, with the structure of kapell.protocol's DataProto."""

from collections.abc import Callable, Sequence
from typing import Any

from kapell.decorators import DispatchPlan


class ListBatch:
    """Columns as lists, a padding mask, and `meta_info` that must agree when joined."""

    def __init__(self, columns: dict[str, list[Any]], meta_info: dict[str, Any] | None = None, auto_padding=False):
        self.data = columns
        self.meta_info = dict(meta_info or {})
        self.auto_padding = auto_padding
        self.padding_mask = [False] * len(self)

    def __len__(self) -> int:
        return len(next(iter(self.data.values()), []))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.data)

    def column(self, name: str) -> list[Any]:
        return self.data[name]

    def select_idxs(self, idxs: Sequence[int]) -> "ListBatch":
        part = ListBatch({n: [c[i] for i in idxs] for n, c in self.data.items()}, self.meta_info, self.auto_padding)
        part.padding_mask = [self.padding_mask[i] for i in idxs]
        return part

    def slice(self, start: int, end: int) -> "ListBatch":
        return self.select_idxs(list(range(start, end)))

    def select(self, names: list[str]) -> "ListBatch":
        return ListBatch({name: self.data[name] for name in names}, self.meta_info, self.auto_padding)

    def chunk(self, chunks: int) -> list["ListBatch"]:
        raise AssertionError("a batch with select_idxs is not chunked by itself")

    @staticmethod
    def concat(parts: list["ListBatch"]) -> "ListBatch":
        first = parts[0]
        assert all(part.meta_info == first.meta_info and part.columns == first.columns for part in parts)
        joined = ListBatch({n: [v for part in parts for v in part.data[n]] for n in first.data}, first.meta_info)
        joined.padding_mask = [flag for part in parts for flag in part.padding_mask]
        return joined

    def is_padding_enabled(self) -> bool:
        return self.auto_padding

    def padding(self, padding_size: int) -> None:
        for column in self.data.values():
            column.extend([column[-1]] * padding_size)
        self.padding_mask.extend([True] * padding_size)

    def without_padding(self) -> "ListBatch":
        return self.select_idxs([i for i, padded in enumerate(self.padding_mask) if not padded])


def ids(count: int, *, auto_padding: bool = False) -> ListBatch:
    """A batch of one column, `id`, from 0 on."""
    return ListBatch({"id": list(range(count))}, auto_padding=auto_padding)


def run(plan: DispatchPlan, work: Callable[..., Any]) -> Any:
    """Run a plan in this process: `work(*args, **kwargs)` on each running rank."""
    outputs = {rank: _call(plan, rank, work) for rank in plan.ranks}
    return plan.collect([outputs[rank] for rank in plan.collect_ranks])


def _call(plan: DispatchPlan, rank: int, work: Callable[..., Any]) -> Any:
    args, kwargs = plan.call_for(rank)
    return work(*args, **kwargs)
