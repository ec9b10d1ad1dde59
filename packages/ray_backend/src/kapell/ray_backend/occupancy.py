"""How many groups of this program live in each bundle: one too many would wait for ever for its share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

__all__ = ["Occupied", "occupy"]

_groups_in: Counter[Hashable] = Counter()


class Occupied:
    """Places that a group holds until `leave`."""

    def __init__(self, places: Sequence[Hashable]) -> None:
        self._places = list(places)
        _groups_in.update(self._places)

    def leave(self) -> None:
        """Give the places back. Harmless when repeated."""
        places, self._places = self._places, []
        _groups_in.subtract(places)


def occupy(places: Sequence[Hashable], limit: int) -> Occupied:
    """Take a share of each place, of which there are ``limit``. Raises ``ValueError`` when one has none left.

    >>> first = occupy(["a", "b"], 1)
    >>> occupy(["b"], 1)
    Traceback (most recent call last):
    ...
    ValueError: 1 groups already share this pool; close one, or make the pool with max_colocate_count above 1
    >>> first.leave(); occupy(["b"], 1).leave()
    """
    if any(_groups_in[place] >= limit for place in places):
        raise ValueError(
            f"{limit} groups already share this pool; close one, or make the pool with max_colocate_count above {limit}"
        )
    return Occupied(places)
