"""The data that batch benchmarks share: columns as a reinforcement learning step has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["MB", "checked", "float_columns", "make_columns", "small_arrays", "small_columns"]

MB = 1_000_000
_BYTES_PER_TOKEN = 8 + 8 + 4 + 4  # two integer columns, two of floats


def make_columns(rows: int, row_bytes: int) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray]]:
    """Tensor columns of ``row_bytes`` a row in all, and two object columns: an id and a dict."""
    tokens = max(1, row_bytes // _BYTES_PER_TOKEN)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "input_ids": torch.randint(0, 32_000, (rows, tokens), generator=generator),
        "attention_mask": torch.ones(rows, tokens, dtype=torch.int64),
        "old_log_probs": torch.randn(rows, tokens, generator=generator),
        "advantages": torch.randn(rows, tokens, generator=generator),
    }
    objects = {
        "uid": np.array([f"prompt-{row // 8}" for row in range(rows)], dtype=object),
        "extra_info": np.array([{"index": row, "split": "train"} for row in range(rows)], dtype=object),
    }
    return tensors, objects


def small_columns(rows: int) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray]]:
    """`make_columns` of 16 tokens a row."""
    return make_columns(rows, 16 * _BYTES_PER_TOKEN)


def small_arrays(rows: int) -> dict[str, np.ndarray]:
    """`small_columns` as numpy arrays, all in one."""
    tensors, objects = small_columns(rows)
    return {**{name: tensor.numpy() for name, tensor in tensors.items()}, **objects}


def float_columns(megabytes: int, num_columns: int = 4) -> dict[str, np.ndarray]:
    """Float columns of ``megabytes`` in all, 4 kB a row in each, for transfers; verl needs rows that divide evenly."""
    rows = 8 * max(1, megabytes * MB // (num_columns * 4096 * 8))
    random = np.random.default_rng(1)
    return {f"column_{i}": random.random((rows, 1024), dtype=np.float32) for i in range(num_columns)}


def checked(answer: Any, expected: Any, what: str) -> Any:
    """``answer``, if it is what is expected: a fast wrong answer must not win."""
    if answer != expected:
        raise RuntimeError(f"{what}: got {answer!r}, expected {expected!r}")
    return answer
