"""Large arguments arrive in a task of their own, so that the store is rid of them before the method runs."""

import os
import signal

import numpy as np
import pytest
import ray

from kapell.decorators import Dispatch, Reduction, register
from kapell.ray_backend import RayWorkerGroup, workers
from kapell.workergroup import ClassWithInitArgs, Worker, WorkerFailedError, WorkerLostError

LARGE = 50_000  # numbers; Ray gets them through its store


class Explosive:
    """Cannot be read where a worker runs."""

    def __init__(self, array):
        self.array = array

    def __reduce__(self):
        return explode, (self.array,)


def explode(array):
    raise ArithmeticError(f"{len(array)} numbers exploded")


class Taker(Worker):
    def __init__(self):
        super().__init__()
        self.seen = []

    @register(Dispatch.DP_COMPUTE_PROTO)
    def add(self, array):
        self.seen.append("add")
        array += self.rank  # private
        return array

    @register(Dispatch.DP_COMPUTE_PROTO)
    async def add_later(self, array):
        return array + 1

    @register(Dispatch.ONE_TO_ALL)
    def total(self, array, scale, *, shift):
        self.seen.append("total")
        return float(array.sum()) * scale + shift

    @register(Dispatch.ONE_TO_ALL)
    def note(self, word):
        self.seen.append(word)

    @register(Dispatch.RANK_ZERO, collect=Reduction.FIRST)
    def order(self):
        return self.seen

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, array):
        raise LookupError(f"no use for {len(array)} numbers")

    @register(Dispatch.ONE_TO_ALL)
    def die(self, array, rank):
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.rank


@pytest.fixture
def large(monkeypatch):
    """What counts as large."""
    monkeypatch.setattr(workers, "_RECEIVED_BYTES", 8 * LARGE // 2)  # two ranks read what is for all
    return np.arange(float(LARGE))


@pytest.fixture(scope="module")
def group(pool):
    with RayWorkerGroup(pool, ClassWithInitArgs(Taker)) as group:
        yield group


@pytest.fixture
def received(monkeypatch):
    """The kinds of tasks that calls are sent as, from here on."""
    kinds = []
    method = workers.RayWorkers._method

    def noted(self, call, kind):
        kinds.append(kind)
        return method(self, call, kind)

    monkeypatch.setattr(workers.RayWorkers, "_method", noted)
    return kinds


def test_a_large_share_arrives_first_and_private(group, large, received):
    both = np.concatenate([large, large])
    expected = np.concatenate([large, large + 1])
    assert np.array_equal(group.add(both), expected)
    assert received == ["receive", "call_received"] * 2
    assert np.array_equal(both[:LARGE], large)


def test_a_small_one_comes_with_its_call(group, large, received):
    assert group.add(np.zeros(4)).tolist() == [0, 0, 1, 1]
    assert received == ["call"] * 2


def test_an_argument_for_all_arrives_once_at_each_with_what_lies_beside_it(group, large, received):
    assert group.total(large, 2, shift=1) == [large.sum() * 2 + 1] * 2
    assert received == ["receive", "call_received"] * 2


def test_calls_run_in_the_order_in_which_they_were_made(group, large):
    before = len(group.order())
    pending = [
        group.total.options(blocking=False)(large, 1, shift=0),
        group.note.options(blocking=False)("between"),
        group.add.options(blocking=False)(np.concatenate([large, large])),
        group.note.options(blocking=False)("after"),
    ]
    for call in pending:
        call.get(timeout=120)
    assert group.order()[before:] == ["total", "between", "add", "after"]


def test_async_methods_take_them_too(pool, large, received):
    with RayWorkerGroup(pool, ClassWithInitArgs(Taker), options={"max_concurrency": 2}) as group:
        assert np.array_equal(group.add_later(np.concatenate([large, large])), np.concatenate([large, large]) + 1)
        assert group.total(large, 1, shift=0) == [large.sum()] * 2
    assert received == ["receive", "call_received"] * 4


def test_the_methods_error_arrives_as_itself(group, large):
    with pytest.raises(WorkerFailedError) as caught:
        group.fail(large)
    assert {rank: str(error) for rank, error in caught.value.failures.items()} == dict.fromkeys(
        range(2), "no use for 50000 numbers"
    )
    assert group.total(large, 1, shift=0) == [large.sum()] * 2


def test_an_argument_that_cannot_be_read_fails_its_call_and_the_group_goes_on(group, large):
    with pytest.raises(WorkerFailedError, match="50000 numbers exploded") as caught:
        group.total(Explosive(large), 1, shift=0)
    assert sorted(caught.value.failures) == [0, 1]
    assert group.total(large, 1, shift=0) == [large.sum()] * 2


def test_a_worker_lost_after_it_took_them_is_told_and_the_others_answers_stay(pool, large):
    with RayWorkerGroup(pool, ClassWithInitArgs(Taker)) as group:
        with pytest.raises(WorkerLostError, match="lost rank 1 of 2") as caught:
            group.die(large, 1)
        assert caught.value.results == {0: 0}
        group.restart(1)
        assert group.total(large, 1, shift=0) == [large.sum()] * 2


def test_a_worker_lost_before_it_could_take_them_is_told(pool, large, lose_worker):
    with RayWorkerGroup(pool, ClassWithInitArgs(Taker)) as group:
        group.total(large, 1, shift=0)  # has imported what it needs to answer in time
        lose_worker(group, 0)
        with pytest.raises(WorkerLostError, match="lost rank 0 of 2") as caught:
            group.total(large, 1, shift=0)
        assert caught.value.results == {1: large.sum()}


@pytest.mark.parametrize("way", ["detached", "attached", "read-only", "in a worker"])
def test_workers_that_outlive_the_caller_and_views_get_all_at_once(pool, group, large, received, way):
    if way == "attached":
        used = RayWorkerGroup(worker_handles=group.workers, ray_cls_with_init=ClassWithInitArgs(Taker))
    elif way == "in a worker":
        used = ray.get(ray.put(group))  # as it reaches one
    else:
        options = {"detached": True} if way == "detached" else {"arrivals": "read-only"}
        used = RayWorkerGroup(pool, ClassWithInitArgs(Taker), **options)
    assert used.total(large, 1, shift=0) == [large.sum()] * 2
    assert received == ["call"] * 2
    if way in ("detached", "read-only"):
        used.close()
