"""Memory for large results: on huge pages, where touching it for the first time costs less than filling it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from kapell.protocol.read_only import ReadOnlyTensor

__all__ = ["HUGE_BYTES", "large_output"]

HUGE_BYTES = 1 << 22
"""From here on numpy asks for huge pages. torch never does: first touches of its pages cost more than the copy."""


def large_output(pieces: Sequence[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor | None:
    """Give what an operation on ``pieces`` may write its result to; None where torch had better make it itself.

    That is for small results, for tensors on other devices or of other types, and inside a graph, where ``out=`` is
    refused.
    """
    size = prod(shape) * pieces[0].element_size()
    if size < HUGE_BYTES or not all(map(_is_plain, pieces)):
        return None
    return torch.from_numpy(np.empty(size, dtype=np.uint8)).view(pieces[0].dtype).view(shape)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, ReadOnlyTensor) and tensor.is_cpu and not tensor.requires_grad
