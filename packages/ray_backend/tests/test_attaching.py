"""Attaching to workers of which some are gone, or which are no group."""

import os
import signal

import pytest

from kapell.decorators import Dispatch, register
from kapell.ray_backend import RayWorkerGroup
from kapell.workergroup import ClassWithInitArgs, Worker, WorkerLostError


class Idle(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def number(self):
        return self.rank


@pytest.fixture(scope="module")
def thinned(backend, wait_until):
    """A group of three whose rank 1 is gone."""
    with (
        backend.resource_pool([3]) as pool,
        RayWorkerGroup(pool, ClassWithInitArgs(Idle), role="thinned", name_prefix="thinned_") as group,
    ):
        os.kill(group.processes[1].pid, signal.SIGKILL)
        assert wait_until(lambda: group.is_alive() == [True, False, True])
        yield group


ATTACH = {
    "handles": lambda group: {"worker_handles": group.workers},
    "names": lambda group: {"worker_names": group.worker_names},
    "prefix": lambda group: {"name_prefix": "thinned_"},
    "some names": lambda group: {"worker_names": [group.worker_names[0], "thinned_nobody", group.worker_names[2]]},
    "some handles": lambda group: {"worker_handles": [group.workers[2], group.workers[0]]},
}


@pytest.mark.parametrize("way", ATTACH)
def test_a_worker_that_is_gone_is_named_however_the_group_is_attached_to(thinned, way):
    with pytest.raises(WorkerLostError, match=r"kept.* lost rank 1 of 3(?s:.*)start the group anew") as caught:
        RayWorkerGroup.from_detached(role="kept", **ATTACH[way](thinned))
    assert list(caught.value.failures) == [1]
    reason = caught.value.failures[1].reason
    if way == "handles":
        assert f"pid: {thinned.processes[1].pid}" in reason
    if way in ("handles", "names"):  # some versions of Ray forget the name of a worker that has ended, some do not
        assert thinned.worker_names[1] in reason
    if way == "some names":
        assert "'thinned_nobody'" in reason


def test_a_worker_that_is_gone_has_no_place_to_share(thinned):
    with pytest.raises(WorkerLostError, match=r"thinned.* lost rank 1 of 3") as caught:
        RayWorkerGroup(sharing_with=thinned, ray_cls_with_init=ClassWithInitArgs(Idle))
    assert str(thinned.processes[1].pid) in caught.value.failures[1].node
    assert "restart those of 'thinned'" in "".join(caught.value.__notes__)


def test_names_that_nobody_has_are_refused_with_those_that_there_are(thinned):
    with pytest.raises(ValueError, match=r"'nobody', 'nobody else' in namespace.*another namespace=") as caught:
        RayWorkerGroup.from_detached(worker_names=["nobody", "nobody else"])
    assert thinned.worker_names[0] in str(caught.value)


def test_workers_of_two_groups_are_not_taken_for_one(pool):
    idle = ClassWithInitArgs(Idle)
    with (
        RayWorkerGroup(pool, idle, name_prefix="pair_"),
        RayWorkerGroup(pool, idle, name_prefix="pair_"),
        pytest.raises(ValueError, match=r"of several groups: their ranks are \[0, 0, 1, 1\]"),
    ):
        RayWorkerGroup.from_detached(name_prefix="pair_")


def test_a_group_with_a_restarted_worker_is_whole_again(backend):
    with (
        backend.resource_pool([2]) as pool,
        RayWorkerGroup(pool, ClassWithInitArgs(Idle), name_prefix="again_") as group,
    ):
        group.restart(1)
        assert RayWorkerGroup.from_detached(worker_names=group.worker_names).number() == [0, 1]
        assert RayWorkerGroup.from_detached(worker_handles=group.workers[::-1]).number() == [0, 1]
