"""What the backend, closed groups and groups that travel leave behind: nothing that costs anything."""

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import ray

from kapell.decorators import Dispatch, register
from kapell.ray_backend import RayBackend, RayClassWithInitArgs, RayWorkerGroup
from kapell.workergroup import ClassWithInitArgs, Worker

WEIGHTS = 64_000_000  # bytes


class Loaded(Worker):
    def __init__(self, weights=None):
        super().__init__()
        self.size = 0 if weights is None else len(weights)

    @register(Dispatch.ONE_TO_ALL)
    def number(self):
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def through(self, group):
        return group.number()

    @register(Dispatch.ONE_TO_ALL)
    def restarted(self, group):
        group.restart(0)


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def in_store():
    """Bytes of Ray's store that are taken."""
    return ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"]


@pytest.fixture
def own_backend(cluster, backend):
    return RayBackend(address=cluster.address, log_to_driver=False)


def test_a_group_that_is_closed_is_not_kept_by_its_backend(own_backend, pool):
    group = own_backend.worker_group(pool, ClassWithInitArgs(Loaded))
    kept = weakref.ref(group)
    group.close()
    del group
    gc.collect()
    assert kept() is None


def test_a_group_that_nobody_holds_ends_with_its_processes(own_backend, pool, wait_until):
    group = own_backend.worker_group(pool, ClassWithInitArgs(Loaded))
    pids = [process.pid for process in group.processes]
    view = group[1]
    del group
    gc.collect()
    assert view.number() == [1]  # a part of it holds all of it
    del view
    gc.collect()
    assert wait_until(lambda: not any(map(running, pids)))


def test_closing_the_backend_closes_the_groups_that_are_held(own_backend, pool):
    group = own_backend.worker_group(pool, ClassWithInitArgs(Loaded))
    own_backend.close()
    assert group.closed


def test_a_closed_group_leaves_nothing_of_its_constructors_arguments_in_the_store(own_backend, pool, wait_until):
    weights = np.zeros(WEIGHTS, dtype=np.uint8)
    before = in_store()
    with own_backend.worker_group(pool, ClassWithInitArgs(Loaded, weights)) as group:
        assert wait_until(lambda: in_store() - before > WEIGHTS / 2)
        group.restart(1)
    assert wait_until(lambda: in_store() - before < WEIGHTS / 2)
    assert group.closed


def test_a_group_with_calls_under_way_can_be_sent_and_used(pool):
    with (
        RayWorkerGroup(pool, ClassWithInitArgs(Loaded)) as first,
        RayWorkerGroup(pool, ClassWithInitArgs(Loaded, bytes(WEIGHTS))) as second,
    ):
        pending = second.number.options(blocking=False)()
        assert first.through(second) == [[0, 1]] * 2
        assert pending.get(timeout=240) == [0, 1]
        assert second.stats()["number"].calls == 1
        with pytest.raises(ExceptionGroup, match="restart them there"):
            first.restarted(second)


def test_a_part_of_what_a_process_of_the_pool_holds_can_be_asked_for(pool):
    loaded = RayClassWithInitArgs(Loaded)
    loaded.set_additional_resource({"num_cpus": 0.5})
    with RayWorkerGroup(pool, loaded) as group:
        assert group.number() == [0, 1]
