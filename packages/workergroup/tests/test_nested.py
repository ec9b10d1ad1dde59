import pickle

import pytest

from kapell.decorators import Dispatch, register
from kapell.workergroup import ClassWithInitArgs, LocalWorkerGroup, ResourcePool, Worker, WorkerFailedError


class Inner(Worker):
    def __init__(self, base):
        super().__init__()
        self.base = base

    @register(Dispatch.ONE_TO_ALL)
    def get(self):
        return self.base + self.rank

    @register(Dispatch.ONE_TO_ALL)
    def fail(self):
        if self.rank == 1:
            raise ValueError("deep inside")
        return "fine"


class Outer(Worker):
    """Holds a worker as a plain object, and drives a group of its own."""

    def __init__(self, base):
        super().__init__()
        self.inner = Inner(base)
        self.group = LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Inner, base), role="inner")

    @register(Dispatch.ONE_TO_ALL)
    def get(self):
        return self.inner.get()

    @register(Dispatch.ONE_TO_ALL)
    def get_of_group(self):
        return self.rank, self.group.get()

    @register(Dispatch.ONE_TO_ALL)
    def fail(self):
        return self.group.fail()


@pytest.fixture(params=["serial", "threads"])
def group(request):
    with LocalWorkerGroup(ResourcePool([3]), ClassWithInitArgs(Outer, 2), role="outer", mode=request.param) as group:
        yield group


def test_worker_inside_a_worker_has_its_place(group):
    assert group.get() == [2, 3, 4]


def test_group_inside_a_worker_has_places_of_its_own(group):
    assert group.get_of_group() == [(0, [2, 3]), (1, [2, 3]), (2, [2, 3])]
    assert group.get() == [2, 3, 4]


def test_failure_of_an_inner_group_is_nested_and_travels(group):
    with pytest.raises(WorkerFailedError) as caught:
        group[2].fail()
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert error.contexts[0].role == "outer"
        inner = error.failures[2]
        assert isinstance(inner, WorkerFailedError)
        assert (inner.contexts[0].role, inner.contexts[0].rank) == ("inner", 1)
        assert inner.results == {0: "fine"}
        assert str(inner.failures[1]) == "deep inside"
