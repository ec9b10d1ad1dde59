"""Rows to shards by cost: Karmarkar-Karp differencing, with groups of rows kept whole."""

import heapq
from collections.abc import Hashable, Sequence
from itertools import count
from typing import Any

__all__ = ["assign_rows", "karmarkar_karp"]

# A partial solution is a list of at most `num_parts` sets, largest sum first; absent ones are empty.
# A set is (sum, tree), where a tree is an index or a pair of trees, so that joining two sets costs nothing.
_Tree = Any
_Set = tuple[float, _Tree]


def karmarkar_karp(costs: Sequence[float], num_parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Partition the indices of `costs` into `num_parts` parts of nearly equal sums.

    The largest differencing method of Karmarkar and Karp (1982): the two partial solutions with the largest spreads
    are joined, the largest set of one with the smallest of the other. With `equal_size`, part sizes differ by at
    most one. Each index occurs once; with fewer costs than parts some parts are empty. O(n log n) solutions are
    joined, each of at most `num_parts` sets.

    >>> karmarkar_karp([8, 7, 6, 5, 4], 2)
    [[1, 3, 4], [0, 2]]
    >>> sorted(len(part) for part in karmarkar_karp([1, 2, 3, 4, 5], 2, equal_size=True))
    [2, 3]
    """
    if num_parts < 1:
        raise ValueError(f"cannot partition {len(costs)} costs into {num_parts} parts")
    by_cost = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    step = num_parts if equal_size else 1
    ticket = count()  # breaks ties, so that sets are never compared
    heap: list[tuple[float, int, list[_Set]]] = []
    for start in range(0, len(by_cost), step):
        sets: list[_Set] = [(costs[index], index) for index in by_cost[start : start + step]]
        heap.append((-_spread(sets, num_parts), next(ticket), sets))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heap[0]
        joined = _join(first, second, num_parts)
        heapq.heapreplace(heap, (-_spread(joined, num_parts), next(ticket), joined))
    parts = [sorted(_leaves(tree)) for _, tree in heap[0][2]] if heap else []
    return parts + [[] for _ in range(num_parts - len(parts))]


def assign_rows(costs: Sequence[float], groups: Sequence[Hashable] | None, num_shards: int) -> list[list[int]]:
    """The rows of each shard, ascending, balanced by cost; rows of equal group stay on one shard.

    Without groups, or with groups of one size, shards differ by at most one row, or one group.
    """
    if groups is None:
        return karmarkar_karp(costs, num_shards, equal_size=True)
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    blocks = list(members.values())
    block_costs = [sum(costs[row] for row in block) for block in blocks]
    one_size = len({len(block) for block in blocks}) <= 1
    parts = karmarkar_karp(block_costs, num_shards, equal_size=one_size)
    return [sorted(row for block in part for row in blocks[block]) for part in parts]


def _spread(sets: list[_Set], num_parts: int) -> float:
    return sets[0][0] - (sets[-1][0] if len(sets) == num_parts else 0)


def _join(first: list[_Set], second: list[_Set], num_parts: int) -> list[_Set]:
    overlap = len(first) + len(second) - num_parts
    if overlap <= 0:
        joined = first + second
    else:
        # Position i of `first` meets position num_parts - 1 - i of `second`.
        alone = len(first) - overlap
        joined = first[:alone] + second[: len(second) - overlap]
        joined += [
            (a + b, (left, right))
            for (a, left), (b, right) in zip(first[alone:], reversed(second[len(second) - overlap :]), strict=True)
        ]
    return sorted(joined, key=lambda part: part[0], reverse=True)


def _leaves(tree: _Tree) -> list[int]:
    leaves, pending = [], [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, tuple):
            pending.extend(node)
        else:
            leaves.append(node)
    return leaves
