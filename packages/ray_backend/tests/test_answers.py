"""What others than the call itself learn when its ranks fail: its parts, and the workers that it was passed on to."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.exceptions import RayError

from kapell.decorators import Dispatch, register
from kapell.protocol import DataProto
from kapell.ray_backend import EndedSessionError, RayWorkerGroup
from kapell.workergroup import ClassWithInitArgs, Worker, WorkerFailedError, WorkerLostError


class Maker(Worker):
    def __init__(self):
        super().__init__()
        self.tries = 0

    @register(Dispatch.DP_COMPUTE_PROTO)
    def make(self, seeds):
        if seeds[0] < 0:
            raise ValueError(f"no batch of {seeds[0]}")
        return DataProto.from_dict(non_tensors={"n": seeds})

    @register(Dispatch.DP_COMPUTE_PROTO, idempotent=True)
    def make_at_second_try(self, seeds):
        self.tries += 1
        if self.tries == 1:
            raise ValueError("not yet")
        return DataProto.from_dict(non_tensors={"n": seeds})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def make_after(self, paths):
        """A row, as soon as a file is there."""
        Path(f"{paths[0]}.begun").touch()
        while not Path(paths[0]).exists():
            time.sleep(0.05)
        return DataProto.from_dict(non_tensors={"n": np.arange(1)})

    @register(Dispatch.ONE_TO_ALL)
    def pick(self, rank):
        if self.rank == rank:
            raise ValueError(f"no entry of {rank}")
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def read(self, value):
        return len(value)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def read_own(self, value):
        return [len(value)]


@pytest.fixture(scope="module")
def makers(pool):
    with RayWorkerGroup(pool, ClassWithInitArgs(Maker), role="makers") as group:
        yield group


@pytest.fixture(scope="module")
def readers(pool):
    with RayWorkerGroup(pool, ClassWithInitArgs(Maker), role="readers") as group:
        yield group


@pytest.fixture
def failing(makers):
    return makers.make.options(blocking=False)(np.array([1, 2, -3, 4]))


DERIVED = {
    "part": lambda call: call.chunk(3)[1].get(timeout=240),
    "part of a part": lambda call: call.chunk(2)[1].chunk(2)[0].get(timeout=240),
    "columns": lambda call: call.get(timeout=240, columns=["n"]),
    "columns of a part": lambda call: call.chunk(2)[0].get(timeout=240, columns=["n"]),
}


@pytest.mark.parametrize("kind", DERIVED)
def test_what_is_derived_of_a_failed_call_fails_as_the_call_does(failing, kind):
    with pytest.raises(WorkerFailedError, match=r"makers\.make failed on rank 1 of 2; first: ValueError") as caught:
        DERIVED[kind](failing)
    assert {rank: repr(error) for rank, error in caught.value.failures.items()} == {1: "ValueError('no batch of -3')"}
    assert "rank 1 of makers in make" in "".join(caught.value.failures[1].__notes__)
    assert "no batch of" in "".join(caught.value.failures[1].__notes__)  # the worker's traceback


def test_all_failing_ranks_are_named_together(makers):
    part = makers.make.options(blocking=False)(np.array([-1, -2])).chunk(2)[0]
    with pytest.raises(WorkerFailedError) as caught:
        part.get(timeout=240)
    assert sorted(caught.value.failures) == [0, 1]


@pytest.mark.parametrize("derive", [lambda call: call, lambda call: call.chunk(2)[0]], ids=["whole", "part"])
@pytest.mark.parametrize("method", ["read", "read_own"])
def test_a_worker_that_is_given_a_failed_call_learns_who_failed(failing, readers, derive, method):
    with pytest.raises(WorkerFailedError, match=r"readers\.read.* failed on rank 0, 1 of 2") as caught:
        getattr(readers, method)(derive(failing))
    for error in caught.value.failures.values():
        assert isinstance(error, WorkerFailedError)
        assert "makers.make failed on rank 1 of 2" in str(error)
        assert str(error.failures[1]) == "no batch of -3"


def test_a_worker_that_is_given_a_failed_list_learns_who_failed(makers, readers):
    with pytest.raises(WorkerFailedError) as caught:
        readers.read(makers.pick.options(blocking=False)(0))
    assert str(caught.value.failures[1].failures[0]) == "no entry of 0"


def test_a_part_learns_of_a_lost_worker_although_another_rank_is_still_busy(pool, tmp_path, wait_until):
    with RayWorkerGroup(pool, ClassWithInitArgs(Maker), role="mortal") as group:
        paths = [str(tmp_path / name) for name in "ab"]
        call = group.make_after.options(blocking=False)(np.array(paths, dtype=object))
        assert wait_until(lambda: all(os.path.exists(f"{path}.begun") for path in paths))
        os.kill(group.processes[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match=r"mortal\.make_after lost rank 1 of 2") as caught:
            call.chunk(2)[0].get(timeout=240)
        assert caught.value.unfinished == (0,)
        assert f"(pid {group.processes[1].pid})" in caught.value.failures[1].node
        Path(paths[0]).touch()


def test_a_part_that_is_not_there_in_time_says_who_is_late(makers, tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    call = makers.make_after.options(blocking=False)(np.array(paths, dtype=object))
    try:
        with pytest.raises(TimeoutError, match=r"makers\.make_after: ranks \[0, 1\] had not answered") as caught:
            call.chunk(2)[0].get(timeout=0.1)
        assert not isinstance(caught.value, RayError)
    finally:
        for path in paths:
            Path(path).touch()
    assert len(call.chunk(2)[0].get(timeout=240)) == 1


def test_parts_of_a_call_that_was_tried_again_are_of_its_last_try(makers):
    call = makers.make_at_second_try.options(blocking=False, retry=1)(np.arange(4))
    assert len(call.get(timeout=240)) == 4
    assert call.chunk(2)[1].get(timeout=240).non_tensor_batch["n"].tolist() == [2, 3]


def test_a_pending_batch_says_what_it_is_of(failing):
    assert repr(failing) == "RayPendingBatch(makers.make, 2 shards)"


class Keeper(Worker):
    @register(Dispatch.ONE_TO_ALL, materialize_futures=False)
    def keep(self, *futures):
        self.futures = futures

    @register(Dispatch.ONE_TO_ALL)
    def read(self, position):
        return len(self.futures[position].get(timeout=240))


SENDING_PROGRAM = """
import kapell.protocol, numpy
from kapell.decorators import Dispatch, register
from kapell.ray_backend import RayBackend, RayWorkerGroup
from kapell.workergroup import ClassWithInitArgs, Worker

class Same(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO)
    def same(self, rows):
        return rows

with RayBackend(address="auto", log_to_driver=False) as backend:
    group = backend.worker_group(backend.resource_pool([2]), ClassWithInitArgs(Same), role="sender")
    call = group.same.options(blocking=False)(numpy.arange(100_000))
    keeper = RayWorkerGroup.from_detached(worker_names={names!r}, namespace={namespace!r})
    keeper.keep(call, call.chunk(2)[0])
    print(keeper.read(0), keeper.read(1))
"""


def test_a_future_that_outlives_the_program_of_its_call_says_that_this_has_ended(cluster, pool):
    with RayWorkerGroup(pool, ClassWithInitArgs(Keeper), role="keeper") as keeper:
        namespace = ray.get_runtime_context().namespace
        program = SENDING_PROGRAM.format(names=keeper.worker_names, namespace=namespace)
        environment = {**os.environ, "RAY_ADDRESS": cluster.address}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert "[100000, 100000] [50000, 50000]" in done.stdout, done.stderr
        for position in range(2):
            with pytest.raises(WorkerFailedError, match=r"call sender\.same ended with the Ray session") as caught:
                keeper.read(position)
            assert all(isinstance(error, EndedSessionError) for error in caught.value.failures.values())
