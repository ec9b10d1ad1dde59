"""TransferQueue: the batch is put into it, four actors take their rows and put their answers, the driver takes all."""

from __future__ import annotations

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

from ..timing import seconds_once
from .batches import checked, float_columns
from .ray_session import start_ray


@ray.remote(num_cpus=0)
class Consumer:
    def __init__(self) -> None:
        tq.init()

    def echo(self, keys: list[str]) -> None:
        rows = tq.kv_batch_get(keys=keys, partition_id="sent")
        rows["column_0"][0, 0] += 1
        tq.kv_batch_put(keys=keys, partition_id="answered", fields=rows)


class QueueEcho:
    def __init__(self) -> None:
        start_ray()
        tq.init()
        self._consumers = [Consumer.remote() for _ in range(4)]

    def prepare(self, megabytes: int) -> None:
        columns = {name: torch.from_numpy(array) for name, array in float_columns(megabytes).items()}
        rows = len(columns["column_0"])
        self._batch = TensorDict(columns, batch_size=rows)
        self._keys = [str(row) for row in range(rows)]
        size = rows // 4
        self._shards = [self._keys[size * rank : None if rank == 3 else size * (rank + 1)] for rank in range(4)]
        answer = self._echo()
        checked(bool((answer["column_1"] == columns["column_1"]).all()), True, "echo")
        self._clear()

    def _echo(self) -> TensorDict:
        tq.kv_batch_put(keys=self._keys, partition_id="sent", fields=self._batch)
        ray.get([consumer.echo.remote(keys) for consumer, keys in zip(self._consumers, self._shards, strict=True)])
        return tq.kv_batch_get(keys=self._keys, partition_id="answered")

    def _clear(self) -> None:
        for partition in ("sent", "answered"):
            tq.kv_clear(keys=self._keys, partition_id=partition)

    def round(self) -> dict[str, float]:
        seconds = seconds_once(self._echo)
        self._clear()
        return {"echo": seconds}

    def close(self) -> None:
        for consumer in self._consumers:
            ray.kill(consumer)
        tq.close()
