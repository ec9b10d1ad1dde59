"""A 50 MB batch pickled and read back: Kapell's wire format beside verl's way and beside plain copies of the bytes.

Run: ``python benchmarks/protocol_wire.py [megabytes]``. Each way runs in turn, several rounds; the medians are shown.
verl's way is what verl 0.9.1 does: consolidate the TensorDict, ``torch.save`` it into the pickle, ``torch.load`` it.
"""

import io
import pickle
import statistics
import sys
import time
import warnings

import numpy as np
import torch
from tensordict import TensorDict

from kapell.protocol import DataProto

ROUNDS = 7


def make_batch(megabytes: int) -> DataProto:
    rows = megabytes * 1024
    tensors = {
        "input_ids": torch.randint(0, 1000, (rows, 32)),  # 256 bytes a row
        "attention_mask": torch.ones(rows, 32, dtype=torch.int64),
        "old_log_probs": torch.randn(rows, 64),
        "values": torch.randn(rows, 64),
    }
    return DataProto.from_dict(tensors, {"uid": [f"row-{row}" for row in range(rows // 100)] * 100}, {"step": 1})


def kapell_in_stream(batch: DataProto) -> None:
    pickle.loads(pickle.dumps(batch, protocol=5))


def kapell_default_protocol(batch: DataProto) -> None:
    pickle.loads(pickle.dumps(batch))


def kapell_out_of_band(batch: DataProto) -> None:
    """What Kapell itself does: nothing is copied by dumps, everything once by loads."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    pickle.loads(data, buffers=buffers)


def kapell_with_a_transport(batch: DataProto) -> None:
    """With a transport that copies the buffers once (into shared memory, say) before the arrival copies them out."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])


def verl_way(batch: DataProto) -> None:
    stream = io.BytesIO()
    torch.save(batch.batch.contiguous().consolidate(), stream)
    data = pickle.dumps((stream.getvalue(), batch.non_tensor_batch, batch.meta_info))
    saved, arrays, meta = pickle.loads(data)
    DataProto(torch.load(io.BytesIO(saved), weights_only=False), arrays, meta)


def copy_bytes_twice(batch: DataProto) -> None:
    for column in batch.batch.values():
        source = column.view(-1).view(torch.uint8).numpy()
        np.frombuffer(bytearray(bytes(source.data)), dtype=np.uint8)


def main() -> None:
    warnings.simplefilter("ignore")
    TensorDict({}, [1])
    batch = make_batch(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
    ways = [copy_bytes_twice, kapell_out_of_band, kapell_with_a_transport, kapell_in_stream, kapell_default_protocol]
    ways.append(verl_way)
    seconds: dict[str, list[float]] = {way.__name__: [] for way in ways}
    for _ in range(ROUNDS):
        for way in ways:
            start = time.perf_counter()
            way(batch)
            seconds[way.__name__].append(time.perf_counter() - start)
    floor = statistics.median(seconds["copy_bytes_twice"])
    slow = statistics.median(seconds["verl_way"])
    tensors = sum(column.nbytes for column in batch.batch.values())
    print(f"{tensors / 2**20:.0f} MB of tensors, {len(batch)} rows with a text column; median of {ROUNDS}")
    for name, times in seconds.items():
        middle = statistics.median(times)
        print(
            f"{name:24} {middle * 1e3:8.1f} ms  {middle / floor:5.2f} x two copies  {slow / middle:5.1f} x verl's speed"
        )


if __name__ == "__main__":
    main()
