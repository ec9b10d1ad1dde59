"""Resource pools: how many worker processes each node holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from types import TracebackType
from typing import Any, Self

__all__ = ["ClassWithInitArgs", "ResourcePool"]


class ResourcePool:
    """Nodes with a number of worker processes each; nodes may differ in size.

    ``process_on_nodes`` has one positive entry per node. ``max_colocate_count`` worker groups can share the pool.

    >>> pool = ResourcePool([4, 2])
    >>> pool.world_size, pool.local_rank_list()
    (6, [0, 1, 2, 3, 0, 1])
    """

    def __init__(self, process_on_nodes: Sequence[int], max_colocate_count: int = 10) -> None:
        counts = list(process_on_nodes)
        if not counts:
            raise ValueError(
                "process_on_nodes is empty; give the number of processes of each node, such as [4] or [4, 2]"
            )
        for node, count in enumerate(counts):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(
                    f"process_on_nodes[{node}] is {count!r}; each node needs a whole number of at least 1 process"
                )
        if max_colocate_count < 1:
            raise ValueError(f"max_colocate_count is {max_colocate_count}; at least 1 worker group uses a pool")
        self._process_on_nodes = counts
        self.max_colocate_count = max_colocate_count

    @property
    def store(self) -> list[int]:
        """The number of processes of each node (verl's name for it)."""
        return list(self._process_on_nodes)

    @property
    def process_on_nodes(self) -> list[int]:
        """The number of processes of each node."""
        return list(self._process_on_nodes)

    @property
    def n_nodes(self) -> int:
        """The number of nodes."""
        return len(self._process_on_nodes)

    @property
    def world_size(self) -> int:
        """The number of worker processes on all nodes together."""
        return sum(self._process_on_nodes)

    def local_world_size_list(self) -> list[int]:
        """For each rank, the number of processes on its node."""
        return [count for count in self._process_on_nodes for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For each rank, its position on its node."""
        return [local_rank for count in self._process_on_nodes for local_rank in range(count)]

    @property
    def node_rank_list(self) -> list[int]:
        """For each rank, the number of its node."""
        return [node for node, count in enumerate(self._process_on_nodes) for _ in range(count)]

    def close(self) -> None:
        """Give back what a backend reserved for the pool; in process, nothing. Harmless when repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def split_sizes(self, split_size: int | Sequence[int]) -> list[list[int]]:
        """The ``process_on_nodes`` of each part when the ranks are cut, in order, into parts of ``split_size``.

        A part may span nodes. Raises ``ValueError`` when the sizes do not add up to the world size.

        >>> ResourcePool([4, 2]).split_sizes([3, 3])
        [[3], [1, 2]]
        """
        sizes = self._part_sizes(split_size)
        nodes = self.node_rank_list
        parts = []
        for start, size in zip(accumulate([0, *sizes[:-1]]), sizes, strict=True):
            counts: dict[int, int] = {}
            for node in nodes[start : start + size]:
                counts[node] = counts.get(node, 0) + 1
            parts.append(list(counts.values()))
        return parts

    def split(self, split_size: int | Sequence[int]) -> list[ResourcePool]:
        """Cut the ranks, in order, into pools of the given sizes; see `split_sizes`."""
        return [ResourcePool(counts, self.max_colocate_count) for counts in self.split_sizes(split_size)]

    @staticmethod
    def merge(*pools: ResourcePool) -> ResourcePool:
        """Join several pools of one backend, in order, into one pool of it."""
        if not pools:
            raise ValueError("no pool to merge; give at least one")
        return pools[0]._merged(pools)

    def _merged(self, pools: Sequence[ResourcePool]) -> ResourcePool:
        """`merge` of ``pools``, of which this one is the first."""
        counts = [count for pool in pools for count in pool.process_on_nodes]
        return ResourcePool(counts, min(pool.max_colocate_count for pool in pools))

    def _part_sizes(self, split_size: int | Sequence[int]) -> list[int]:
        if isinstance(split_size, int):
            if split_size < 1 or self.world_size % split_size:
                raise ValueError(
                    f"cannot cut {self.world_size} processes into parts of {split_size}; "
                    "give a divisor or a list of sizes"
                )
            return [split_size] * (self.world_size // split_size)
        sizes = list(split_size)
        if any(size < 1 for size in sizes) or sum(sizes) != self.world_size:
            raise ValueError(
                f"split sizes {sizes} add up to {sum(sizes)}, not to {self.world_size} processes; each is at least 1"
            )
        return sizes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._process_on_nodes})"


class ClassWithInitArgs:
    """A worker class with the arguments that each worker's constructor gets."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    @property
    def worker_class(self) -> type:
        """The plain Python class behind ``cls``."""
        return self.cls

    def __call__(self) -> Any:
        """Build one worker here."""
        return self.worker_class(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.worker_class.__qualname__})"
