"""Time and memory of planning one call, as the group and the batch grow. Run: python benchmarks/planning.py"""

import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from kapell.decorators import Dispatch, DispatchPlan, GroupShape, MeshLayout, MethodSpec, karmarkar_karp, make_plan

WORLDS = (1, 8, 64, 512, 4096)
TENSOR_PARALLEL = 8
NUM_ROWS = 1_000_000
REPEATS = 7


def planner(mode: Dispatch, world_size: int, batch: Any) -> Callable[[], DispatchPlan]:
    peers = min(TENSOR_PARALLEL, world_size)
    layout = MeshLayout(
        tuple(rank // peers for rank in range(world_size)), tuple(rank % peers == 0 for rank in range(world_size))
    )
    shape = GroupShape(world_size, meshes={"actor": layout})
    return lambda: make_plan("update", MethodSpec(dispatch_mode=mode), shape, (batch, {"lr": 1e-6}))


def seconds(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def peak_bytes(work: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        kept = work()
        _, peak = tracemalloc.get_traced_memory()
        del kept
    finally:
        tracemalloc.stop()
    return peak


def main() -> None:
    tokens = torch.zeros(NUM_ROWS, 4, dtype=torch.int32)
    batches = {
        "tensor": tokens,
        "TensorDict": TensorDict({"tokens": tokens}, [NUM_ROWS]),
        "numpy": np.zeros(NUM_ROWS),
        "list": list(range(NUM_ROWS)),
    }
    print(f"{NUM_ROWS:,} rows: time to plan (median of {REPEATS}), its peak memory, and time to cut all shards")
    print(f"{'mode':18} {'batch':11} {'ranks':>5} {'plan ms':>9} {'us/rank':>8} {'MiB':>7} {'cut ms':>9}")
    for mode in (Dispatch.DP_COMPUTE_PROTO, Dispatch.mesh("actor")):
        for kind, batch in batches.items():
            for world_size in WORLDS:
                plan = planner(mode, world_size, batch)
                plan()
                took, memory = seconds(plan), peak_bytes(plan)
                planned = plan()
                cut = seconds(lambda planned=planned: sum(1 for _ in planned.arguments[0].values))
                print(
                    f"{mode.name:18} {kind:11} {world_size:5} {took * 1e3:9.2f} {took / world_size * 1e6:8.2f} "
                    f"{memory / 2**20:7.2f} {cut * 1e3:9.2f}"
                )
    print("\nbalancing by Karmarkar-Karp, equal sizes")
    lengths = np.random.default_rng(0).integers(100, 8000, 100_000).tolist()
    for num_rows, num_parts in ((1024, 8), (16_384, 64), (100_000, 512)):
        took = seconds(lambda n=num_rows, k=num_parts: karmarkar_karp(lengths[:n], k, equal_size=True))
        print(f"{num_rows:7,} rows on {num_parts:3} ranks: {took * 1e3:9.1f} ms")


if __name__ == "__main__":
    main()
