"""Gathering a batch over the ranks of a process group."""

from __future__ import annotations

from typing import Any

import torch.distributed
from tensordict import TensorDict

from kapell.protocol.dataproto import DataProto

__all__ = ["all_gather_data_proto"]


def all_gather_data_proto(data: DataProto, process_group: Any) -> None:
    """Replace a batch by the rows of all ranks of the group, in rank order. Changes ``data``; ``meta_info`` stays.

    The rows travel by the CPU; each column ends on the device where ``data`` had it.
    """
    if not isinstance(data, DataProto):
        raise TypeError(f"a DataProto is gathered, got {type(data).__name__}")
    device = None if data.batch is None else data.batch.device
    away = {name: column.device for name, column in data.tensor_columns().items() if _is_away(column.device)}
    parts: list[Any] = [None] * torch.distributed.get_world_size(group=process_group)
    own = data.select(meta_info_keys=[])
    if away or device is not None:
        own = own.to("cpu")  # elsewhere it would arrive on its sender's device, or have none to arrive on
    torch.distributed.all_gather_object(parts, own, group=process_group)
    gathered = DataProto.concat(parts)
    if device is not None:
        gathered = gathered.to(device)
    elif away:
        columns = gathered.tensor_columns()
        moved = {name: columns[name].to(place) for name, place in away.items()}
        gathered.batch = TensorDict(columns | moved, batch_size=[len(gathered)])
    data._become(gathered)


def _is_away(device: torch.device | None) -> bool:
    return device is not None and device.type != "cpu"
