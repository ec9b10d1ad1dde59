"""The batch that planning benchmarks share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_ROWS_PER_RANK = 4


def make_batch(data_proto: Any, ranks: int) -> Any:
    """A batch of the given DataProto class with four rows for each rank."""
    rows = ranks * _ROWS_PER_RANK
    return data_proto.from_dict(
        tensors={"input_ids": torch.zeros(rows, 16, dtype=torch.int64), "values": torch.zeros(rows, 16)},
        non_tensors={"uid": np.array([str(row) for row in range(rows)], dtype=object)},
    )
