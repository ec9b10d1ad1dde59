"""Memory for large results: used before, or on huge pages, so that touching it costs less than filling it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from kapell.protocol.columns.spare import SPARE
from kapell.protocol.read_only import ReadOnlyTensor

__all__ = ["HUGE_BYTES", "large_output"]

HUGE_BYTES = 1 << 22
"""From here on numpy and `SpareMemory` ask for huge pages. torch never does: fresh pages cost it more than the copy."""


def large_output(pieces: Sequence[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor | None:
    """Give what an operation on ``pieces`` may write its result to; None where torch had better make it itself.

    That is for small results, for tensors on other devices or of other types, and inside a graph, where ``out=`` is
    refused.
    """
    size = prod(shape) * pieces[0].element_size()
    if size < HUGE_BYTES or not all(map(_is_plain, pieces)):
        return None
    return torch.from_numpy(SPARE.array(size)).view(pieces[0].dtype).view(shape)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, ReadOnlyTensor) and tensor.is_cpu and not tensor.requires_grad
