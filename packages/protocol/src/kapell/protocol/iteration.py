"""Mini-batches: in which order rows are walked, the same again for the same seed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

__all__ = ["mini_batches"]


def mini_batches(
    num_rows: int,
    mini_batch_size: int,
    epochs: int,
    *,
    seed: int | None = None,
    shuffle: bool = False,
    drop_last: bool = False,
) -> Iterator[np.ndarray]:
    """Give the row numbers of each mini-batch, epoch after epoch.

    With ``shuffle`` every epoch has its own order, drawn from ``seed`` (the program's generator without one). What
    remains at the end of an epoch is a smaller mini-batch unless ``drop_last``.

    >>> [rows.tolist() for rows in mini_batches(3, 2, epochs=1)]
    [[0, 1], [2]]
    """
    if mini_batch_size < 1:
        raise ValueError(f"a mini-batch has at least 1 row, got mini_batch_size={mini_batch_size}")
    if epochs < 0:
        raise ValueError(f"epochs is not negative, got {epochs}")
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return _walk(num_rows, mini_batch_size, epochs, generator, shuffle=shuffle, drop_last=drop_last)


def _walk(
    num_rows: int, size: int, epochs: int, generator: torch.Generator | None, *, shuffle: bool, drop_last: bool
) -> Iterator[np.ndarray]:
    for _ in range(epochs):
        order = torch.randperm(num_rows, generator=generator).numpy() if shuffle else np.arange(num_rows)
        for start in range(0, num_rows, size):
            rows = order[start : start + size]
            if len(rows) == size or not drop_last:
                yield rows
