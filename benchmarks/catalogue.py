"""All benchmarks, in the order of the document."""

from __future__ import annotations

from .cases import batch, calls, learning, transfer

__all__ = ["BENCHMARKS"]

BENCHMARKS = (*batch.BENCHMARKS, *calls.BENCHMARKS, *transfer.BENCHMARKS, *learning.BENCHMARKS)
