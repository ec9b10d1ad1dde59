"""Attaching to workers of which some are gone, or which are no group."""

import inspect
import os
import signal
import time

import pytest
import ray

from kapell.decorators import Dispatch, register
from kapell.ray_backend import BusyWorkersError, RayWorkerGroup, workers
from kapell.workergroup import CALL_SECONDS, CallTimeoutError, ClassWithInitArgs, Worker, WorkerLostError


class Idle(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def number(self):
        return self.rank

    @register(Dispatch.ALL_TO_ALL)
    def wait_for(self, path):
        while path and not os.path.exists(path):
            time.sleep(0.01)
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


@pytest.fixture
def busy(pool, tmp_path):
    """A group whose rank 1 is in a call, until the test is over."""
    release = tmp_path / "release"
    with RayWorkerGroup(pool, ClassWithInitArgs(Idle), role="busy", name_prefix="busy_") as group:
        pending = group.wait_for.options(blocking=False)(["", str(release)])
        yield group
        release.touch()
        assert pending.get(timeout=240) == [0, 1]


@pytest.mark.parametrize(
    "way",
    [lambda group: {"worker_names": group.worker_names}, lambda group: {"worker_handles": group.workers}],
    ids=["names", "handles"],
)
def test_a_worker_that_stays_busy_is_named_when_it_is_attached_to(busy, way):
    with pytest.raises(BusyWorkersError, match=r"attached group: .* did not answer within 5 s") as caught:
        RayWorkerGroup.from_detached(**way(busy), start_timeout=5)
    (late,) = caught.value.workers
    assert busy.worker_names[1] == late or "worker_names" not in way(busy)


def test_a_worker_that_stays_busy_is_named_when_its_place_is_shared(busy):
    with pytest.raises(TimeoutError, match=r"busy\.visible_devices: ranks \[1\] had not answered after 5 s"):
        RayWorkerGroup(sharing_with=busy, ray_cls_with_init=ClassWithInitArgs(Idle), start_timeout=5)


def test_calls_of_an_attached_group_have_the_limit_that_it_was_given(pool, tmp_path):
    release = tmp_path / "release"
    with RayWorkerGroup(pool, ClassWithInitArgs(Idle)) as group:
        attached = RayWorkerGroup.from_detached(worker_handles=group.workers, timeout=0.5)
        with pytest.raises(CallTimeoutError, match=r"within 0\.5 s"):
            attached.wait_for(["", str(release)])
        release.touch()


@pytest.mark.parametrize("made_by", [RayWorkerGroup, RayWorkerGroup.from_detached])
def test_no_call_waits_for_ever_unless_the_group_is_told_so(made_by):
    assert inspect.signature(made_by).parameters["timeout"].default == CALL_SECONDS


def test_busy_workers_are_waited_for_together_when_asked_whether_they_live(busy, monkeypatch):
    wait, limits = ray.wait, []

    def noted(refs, *, timeout=None, **options):
        limits.append(timeout)
        return wait(refs, timeout=timeout, **options)

    monkeypatch.setattr(ray, "wait", noted)
    assert busy.is_alive() == [True, True]
    assert [health.alive for health in busy.health()] == [True, True]
    assert limits.count(workers._BUSY_AFTER_SECONDS) == 2
