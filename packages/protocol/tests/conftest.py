"""A batch with a column of every kind, used by most tests; and the folder of tests on pytest's path."""

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from kapell.protocol import DataProto

sys.path.insert(0, str(Path(__file__).parent))  # its importlib mode leaves it out
warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype stage")


def mixed_batch(rows: int) -> DataProto:
    """`rows` rows of: dense, bool, bf16, FP8, jagged, jagged along dimension 2, text, object lists, numbers."""
    lengths = [(row * 7) % 5 for row in range(rows)]
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    jagged = torch.nested.nested_tensor_from_jagged(torch.arange(int(offsets[-1])), offsets=offsets)
    channels = torch.arange(4.0 * int(offsets[-1])).view(4, -1)
    jagged_2 = torch.nested.nested_tensor_from_jagged(channels, offsets=offsets, jagged_dim=2)
    return DataProto.from_dict(
        tensors={
            "id": torch.arange(rows),
            "flag": torch.arange(rows) % 3 == 0,
            "half": torch.arange(rows * 2).view(rows, 2).bfloat16(),
            "eighth": torch.arange(rows * 2).view(rows, 2).float().to(torch.float8_e4m3fn),
            "jagged": jagged,
            "channels": jagged_2,
        },
        non_tensors={
            "name": np.array([f"row {row}" for row in range(rows)], dtype="<U8"),
            "cells": [[row, row + 1] for row in range(rows)],
            "score": np.arange(rows, dtype=np.float32),
        },
        meta_info={"step": 7, "settings": {"temperature": 1.0}},
    )


@pytest.fixture
def make_mixed():
    return mixed_batch
