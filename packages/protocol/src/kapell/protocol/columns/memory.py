"""Memory for large results: used before, or on huge pages, so that touching it costs less than filling it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from kapell.protocol.columns.spare import SPARE
from kapell.protocol.read_only import ReadOnlyTensor

__all__ = ["HUGE_BYTES", "as_in_memory", "large_output", "raw_bytes"]

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


def as_in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Give a strided tensor as its numbers lie in the CPU's memory, in row-major order and without autograd.

    It is the tensor's own memory where that is so already. A flag for conjugate or negative numbers is carried out.
    """
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Give `as_in_memory` as uint8 (bytes,)."""
    plain = as_in_memory(tensor)
    # A dimension of size 1 may have any stride, which `view` does not forgive.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, ReadOnlyTensor) and tensor.is_cpu and not tensor.requires_grad
