"""Gathering a batch over the ranks of a process group."""

from __future__ import annotations

from typing import Any

import torch.distributed

from kapell.protocol.dataproto import DataProto

__all__ = ["all_gather_data_proto"]


def all_gather_data_proto(data: DataProto, process_group: Any) -> None:
    """Replace a batch by the rows of all ranks of the group, in rank order. Changes ``data``; ``meta_info`` stays."""
    if not isinstance(data, DataProto):
        raise TypeError(f"a DataProto is gathered, got {type(data).__name__}")
    device = None if data.batch is None else data.batch.device
    parts: list[Any] = [None] * torch.distributed.get_world_size(group=process_group)
    own = data.select(meta_info_keys=[])
    torch.distributed.all_gather_object(parts, own if device is None else own.to("cpu"), group=process_group)
    gathered = DataProto.concat(parts)
    data._become(gathered if device is None else gathered.to(device))
