"""Too little memory: a worker that Ray ends, a value that the object store has no room for. Never a hang.

What a machine lacks is set where Ray starts: this file also is the program that does so, in a Ray of its own.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kapell.decorators import Dispatch, Reduction, register
from kapell.ray_backend import RayBackend, StoreFullError
from kapell.workergroup import ClassWithInitArgs, Worker, WorkerFailedError, WorkerLostError

MB = 1_000_000
STORE_BYTES = 80 * MB
SPARE_BYTES = 1500 * MB  # what all processes of the machine may take together before Ray's memory monitor acts
LIMIT_SECONDS = 200
FREED_SECONDS = 1.0  # for Ray to free what nothing refers to any more: with its disk full, it waits for nothing


class Eater(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def make(self, rank, megabytes):
        return np.ones(megabytes * MB, dtype=np.int8) if self.rank == rank else self.rank

    @register(Dispatch.ONE_TO_ALL)
    def size(self, array):
        return array.nbytes

    @register(Dispatch.RANK_ZERO)
    def turned(self, array):
        time.sleep(FREED_SECONDS)
        return -array

    @register(Dispatch.DP_COMPUTE_PROTO, collect=Reduction.LIST)
    def eat(self, megabytes):
        """Take so much memory, piece by piece."""
        return sum(array.nbytes for array in [np.ones(100 * MB, dtype=np.int8) for _ in range(megabytes[0] // 100)])


def told(call):
    """What became of the call, for the test's process."""
    try:
        call()
    except (StoreFullError, WorkerFailedError) as error:
        failures = error.failures if isinstance(error, WorkerFailedError) else {}
        return {
            "kind": type(error).__name__,
            "text": str(error),
            "failed": {rank: type(failure).__name__ for rank, failure in failures.items()},
            "results": getattr(error, "results", {}),
        }
    return {"kind": "fine"}


def main():
    total, available = (
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith(("MemTotal", "MemAvailable"))
    )
    os.environ |= {
        "RAY_local_fs_capacity_threshold": "0.000001",  # any disk counts as full
        "RAY_memory_monitor_refresh_ms": "100",
        "RAY_memory_usage_threshold": f"{(total - available + SPARE_BYTES) / total:.6f}",
    }
    options = {"num_cpus": 2, "object_store_memory": STORE_BYTES, "log_to_driver": False}
    with RayBackend(address="local", **options) as backend:
        pool = backend.resource_pool([2])
        group = backend.worker_group(pool, ClassWithInitArgs(Eater), role="eaters", timeout=LIMIT_SECONDS)
        seen = {
            "answer": told(lambda: group.make(1, 200)),
            "argument": told(lambda: group.size(np.ones(200 * MB, dtype=np.int8))),
            "afterwards": group.size(np.ones(20 * MB, dtype=np.int8)),
        }
        time.sleep(FREED_SECONDS)
        seen |= {
            "large": told(lambda: group.turned(np.ones(70 * MB, dtype=np.int8))),
            "memory": told(lambda: group.eat([0, 2 * SPARE_BYTES // MB])),
        }
    sys.stdout.write(json.dumps(seen))


@pytest.fixture(scope="module")
def seen():
    if not Path("/proc/meminfo").exists():
        pytest.skip("Ray's memory monitor needs Linux")
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_an_argument_without_room_is_an_error_with_both_sizes_and_the_way_out(seen):
    told = seen["argument"]
    assert told["kind"] == StoreFullError.__name__
    assert "an argument of 200.0 MB" in told["text"]
    assert "object store of 80.0 MB" in told["text"]
    assert "object_store_memory" in told["text"]


def test_an_answer_without_room_fails_its_rank_alone_and_says_how_large_it_was(seen):
    told = seen["answer"]
    assert told["kind"] == WorkerFailedError.__name__
    assert told["failed"] == {"1": StoreFullError.__name__}
    assert told["results"] == {"0": 0}
    assert "the answer of rank 1 of 200.0 MB" in told["text"]
    assert "object store of 80.0 MB" in told["text"]


def test_a_group_goes_on_after_the_store_was_full(seen):
    assert seen["afterwards"] == [20 * MB] * 2


def test_a_large_argument_has_left_the_store_when_the_answer_comes(seen):
    assert seen["large"] == {"kind": "fine"}, "an argument and an answer of 70 MB, in a store of 80"


def test_a_worker_ended_for_its_memory_is_lost_with_rank_node_and_reason_and_the_others_answers_stay(seen):
    told = seen["memory"]
    assert told["kind"] == WorkerLostError.__name__
    assert "eaters.eat lost rank 1 of 2" in told["text"]
    assert "(pid " in told["text"]
    assert "out of memory (OOM)" in told["text"]
    assert "RAY_memory_usage_threshold" in told["text"]
    assert told["results"] == {"0": 0}


if __name__ == "__main__":
    main()
