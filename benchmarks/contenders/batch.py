"""DataProto's operations, by the names that Kapell and verl share: one class measures either."""

from __future__ import annotations

import importlib
import os
import pickle
from typing import Any

import numpy as np
import torch

from ..timing import seconds_once, seconds_per_call
from .batches import MB, checked, make_columns

_CHUNKS = 8


class BatchOperations:
    """``chunk``, ``concat``, ``union``, ``select`` and ``select_idxs`` of the DataProto in ``module``."""

    def __init__(self, module: str) -> None:
        self._data_proto = importlib.import_module(module).DataProto

    def prepare(self, rows: int = 0, megabytes: int = 0) -> None:
        # Either the rows grow, at 1 kB each, or the bytes, in 1,024 rows.
        row_bytes = megabytes * MB // 1024 if megabytes else 1024
        rows = rows or 1024
        tensors, objects = make_columns(rows, row_bytes)
        make = self._data_proto.from_dict
        self._batch = make(tensors=tensors, non_tensors=objects, meta_info={"step": 1})
        self._other = make(
            tensors={"values": torch.zeros(rows, max(1, row_bytes // 96))}, non_tensors={"uid": objects["uid"]}
        )
        self._rows = rows
        # Both dispatch in equal parts only without padding: the sizes are multiples of the chunks, or one row each.
        self._chunks = _CHUNKS if rows % _CHUNKS == 0 else 2
        self._parts = self._batch.chunk(self._chunks)
        self._order = torch.from_numpy(np.random.default_rng(1).permutation(rows))
        checked(len(self._data_proto.concat(self._parts)), rows, "concat")

    def round(self) -> dict[str, float]:
        batch, data_proto = self._batch, self._data_proto
        calls = {
            "pickle": lambda: pickle.loads(pickle.dumps(batch)),
            "chunk": lambda: batch.chunk(self._chunks),
            "concat": lambda: data_proto.concat(self._parts),
            "union": lambda: _fresh(batch).union(self._other),
            "select": lambda: batch.select(batch_keys=["input_ids", "advantages"], non_tensor_batch_keys=["uid"]),
            "select rows": lambda: batch.select_idxs(self._order),
        }
        return {name: seconds_per_call(call, at_least=0.02) for name, call in calls.items()}


def _fresh(batch: Any) -> Any:
    """The same columns in a new container: verl's union writes into the batch it is called on."""
    return type(batch)(
        batch=batch.batch.copy(), non_tensor_batch=dict(batch.non_tensor_batch), meta_info=dict(batch.meta_info)
    )


class Wire:
    """A batch pickled and read back, by the DataProto in ``module``."""

    def __init__(self, module: str, way: str = "default protocol", environment: dict[str, str] | None = None) -> None:
        self._data_proto = importlib.import_module(module).DataProto
        self._way = way
        self._environment = environment or {}

    def prepare(self, megabytes: int) -> None:
        tensors, objects = make_columns(max(8, megabytes * 1024 // 4), 4 * 1024 * MB // 2**20)
        self._batch = self._data_proto.from_dict(tensors=tensors, non_tensors={"uid": objects["uid"]})
        self._bytes = [column.view(torch.uint8).numpy() for column in tensors.values()]

    def round(self) -> dict[str, float]:
        os.environ.update(self._environment)
        try:
            return {"round trip": seconds_once(getattr(self, f"_{self._way.replace(' ', '_')}"))}
        finally:
            for name in self._environment:
                del os.environ[name]

    def _default_protocol(self) -> Any:
        return pickle.loads(pickle.dumps(self._batch))

    def _in_stream(self) -> Any:
        return pickle.loads(pickle.dumps(self._batch, protocol=5))

    def _out_of_band(self) -> Any:
        """What Kapell itself does: nothing is copied by dumps, everything once by loads."""
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(self._batch, protocol=5, buffer_callback=buffers.append)
        return pickle.loads(data, buffers=buffers)

    def _transport(self) -> Any:
        """With a transport that copies the buffers once, as into shared memory, before the arrival does."""
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(self._batch, protocol=5, buffer_callback=buffers.append)
        return pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])

    def _copies(self) -> Any:
        return [bytearray(bytes(column.data)) for column in self._bytes]
