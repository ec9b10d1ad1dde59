"""Object columns: one Python object a row, in a one-dimensional array whatever the objects look like."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["column_of_objects", "flat_objects"]


def column_of_objects(cells: Iterable[Any]) -> np.ndarray:
    """Put one object into each row. numpy would turn lists of equal length into a matrix.

    >>> column_of_objects([[1, 2], [3, 4]]).shape
    (2,)
    """
    cells = list(cells)
    return np.fromiter(cells, dtype=object, count=len(cells))  # an assignment to a slice would look into the cells


def flat_objects(column: np.ndarray) -> np.ndarray:
    """Make an object array one-dimensional: what numpy stacked becomes one list a row again."""
    if column.ndim <= 1 or column.dtype != object:
        return column
    return column_of_objects(row.tolist() for row in column)
