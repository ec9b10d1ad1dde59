"""Micro-batches by a budget of tokens, with the same number of them on every rank.

Each micro-batch is a forward and a backward pass in which all ranks meet, so a rank with less to do still makes as many
passes; an empty one is run on a dummy row of weight zero.
"""

from collections.abc import Sequence

from kapell.decorators import karmarkar_karp

__all__ = ["micro_batches", "num_micro_batches", "plan_micro_batches"]


def plan_micro_batches(lengths_per_rank: Sequence[Sequence[int]], *, max_tokens: int) -> list[list[list[int]]]:
    """For each rank its micro-batches, each a list of rows; as many on every rank, none above `max_tokens`.

    >>> [[len(rows) for rows in rank] for rank in plan_micro_batches([[8, 8, 8], [8, 1, 1]], max_tokens=8)]
    [[1, 1, 1], [1, 1, 1]]
    """
    num = max((num_micro_batches(lengths, max_tokens=max_tokens) for lengths in lengths_per_rank), default=0)
    return [micro_batches(lengths, max_tokens=max_tokens, num=num) for lengths in lengths_per_rank]


def num_micro_batches(lengths: Sequence[int], *, max_tokens: int) -> int:
    """How many micro-batches one rank needs; where ranks decide by themselves, take the maximum over them."""
    return len(_packed(lengths, max_tokens))


def micro_batches(lengths: Sequence[int], *, max_tokens: int, num: int) -> list[list[int]]:
    """The rows of one rank in `num` micro-batches of similar cost; some are empty if there are fewer rows."""
    packing = _packed(lengths, max_tokens)
    if num < len(packing):
        raise ValueError(f"{len(lengths)} rows need {len(packing)} micro-batches of {max_tokens} tokens, not {num}")
    balanced = _balanced(lengths, min(num, len(lengths)))
    if _fits(balanced, lengths, max_tokens):
        packing = balanced
    if not packing:
        return [[] for _ in range(num)]
    while len(packing) < num:
        largest = max(packing, key=len)
        half = len(largest) // 2
        packing = [rows for rows in packing if rows is not largest] + [largest[:half], largest[half:]]
    return [sorted(rows) for rows in packing]


def _packed(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """A packing within the budget: a balanced one if it has the fewest parts possible, else first-fit decreasing."""
    for row, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(f"row {row} has {length} tokens, above the budget of {max_tokens} tokens per micro-batch")
    if not lengths:
        return []
    fewest = max(-(-sum(lengths) // max_tokens), 1)
    balanced = _balanced(lengths, fewest)
    if _fits(balanced, lengths, max_tokens):
        return balanced
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        place = next((i for i, left in enumerate(room) if left >= lengths[row]), None)
        if place is None:
            bins.append([row])
            room.append(max_tokens - lengths[row])
        else:
            bins[place].append(row)
            room[place] -= lengths[row]
    return bins


def _balanced(lengths: Sequence[int], num: int) -> list[list[int]]:
    return karmarkar_karp(lengths, num) if num else []


def _fits(parts: list[list[int]], lengths: Sequence[int], max_tokens: int) -> bool:
    return all(sum(lengths[row] for row in rows) <= max_tokens for rows in parts)
