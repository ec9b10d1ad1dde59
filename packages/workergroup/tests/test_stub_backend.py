"""A backend is small: this one has all ranks answer by a rule, so that a group of thousands costs nothing else."""

import asyncio

import pytest

from kapell.decorators import Dispatch, register
from kapell.workergroup import (
    CallRunner,
    LostWorker,
    RankCall,
    Worker,
    WorkerFailedError,
    WorkerGroup,
    Workers,
    use_worker_env,
)


class Rows(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, rows):
        return rows

    @register(Dispatch.ONE_TO_ALL)
    def whole(self, value):
        return value


class StubWorkers(Workers):
    """Each rank returns its first argument; a handle is the call itself."""

    def __init__(self, world_size, failing=()):
        self._world_size = world_size
        self.failing = failing
        self.puts = []
        self.waits = 0

    @property
    def world_size(self):
        return self._world_size

    def put(self, value, num_readers):
        self.puts.append(num_readers)
        return value

    def submit(self, call):
        return call

    def wait(self, handles, timeout):
        self.waits += 1
        return list(handles)

    def fetch(self, handle):
        if handle.rank in self.failing:
            raise ValueError("no")
        return handle.args[0]

    def is_alive(self, rank):
        return True

    def restart(self, rank):
        self.failing = ()

    def close(self):
        pass

    def run_times(self, ranks, timeout):
        return {}


def test_four_thousand_ranks_give_their_rows_in_order():
    group = WorkerGroup(StubWorkers(4096), Rows)
    assert group.rows(list(range(10_000))) == list(range(10_000))
    assert group.stats()["rows"].ranks[4095].bytes_in > 0


def test_replicated_argument_is_put_once_and_shards_once_each():
    workers = StubWorkers(512)
    group = WorkerGroup(workers, Rows)
    group.whole([1, 2, 3])
    assert workers.puts == [512]
    workers.puts.clear()
    group.rows(list(range(512)))
    assert workers.puts == [1] * 512


def test_answers_of_all_ranks_are_waited_for_at_once():
    workers = StubWorkers(512)
    WorkerGroup(workers, Rows).rows(list(range(512)))
    assert workers.waits == 1


def test_failures_among_thousands_are_told_in_rank_order():
    group = WorkerGroup(StubWorkers(4096, failing={4000, 7}), Rows, role="many")
    with pytest.raises(WorkerFailedError, match=r"many.whole failed on rank 7, 4000 of 4096") as caught:
        group.whole(1)
    assert len(caught.value.results) == 4094


class Clocked(Worker):
    def ping(self, value=None):
        return value

    async def meet(self, event):
        event.set()
        await asyncio.sleep(0.01)
        return "met"


@pytest.fixture
def runner():
    with use_worker_env({"RANK": "0", "WORLD_SIZE": "1"}):
        runner = CallRunner(Clocked())
    yield runner
    runner.close()


class RunnerWorkers(StubWorkers):
    """One rank behind a `CallRunner`, as a backend of processes has it."""

    def __init__(self, runner):
        super().__init__(1)
        self.runner = runner

    def submit(self, call):
        return self.runner.run(call.method, call.args, call.kwargs, number=call.number, wanted=call.wanted)

    def fetch(self, handle):
        return handle

    def run_times(self, ranks, timeout):
        return Workers.run_times(self, ranks, timeout)


def test_run_times_are_asked_through_an_ordinary_call(runner):
    workers = RunnerWorkers(runner)
    workers.submit(RankCall(0, "ping", number=7))
    (run,) = workers.run_times([0], 1.0)[0]
    assert run.number == 7
    assert run.started <= run.finished
    assert workers.run_times([0], 1.0) == {0: []}


class BusyWorkers(RunnerWorkers):
    """One rank that answers only when the test says so."""

    free = False
    lost = False

    def __init__(self, runner):
        super().__init__(runner)
        self.questions = []

    def submit(self, call):
        self.questions.append(call)
        return call

    def wait(self, handles, timeout):
        return list(handles) if self.free else []

    def fetch(self, handle):
        if self.lost:
            raise LostWorker("gone")
        return super().submit(handle)


def test_what_a_busy_rank_was_asked_is_heard_the_next_time(runner):
    workers = BusyWorkers(runner)
    runner.run("ping", (1,), {}, number=7)
    for _ in range(3):
        assert workers.run_times([0], 0.01) == {}
    assert len(workers.questions) == 1
    workers.free = True
    told = workers.run_times([0], 0.01)
    assert [run.number for run in told[0]] == [7]
    assert len(workers.questions) == 2  # what ran since the first one was answered is asked, too
    assert workers.run_times([0], 0.01) == {0: []}


def test_a_rank_that_is_lost_while_it_is_asked_tells_nothing_and_is_asked_anew(runner):
    workers = BusyWorkers(runner)
    assert workers.run_times([0], 0.01) == {}
    workers.free = workers.lost = True
    assert workers.run_times([0], 0.01) == {}
    workers.lost = False
    assert workers.run_times([0], 0.01) == {0: []}


def test_result_that_nobody_wants_does_not_travel(runner):
    assert runner.run("ping", (1,), {}, wanted=False) is None
    assert runner.run("ping", (1,), {}) == 1


def test_async_methods_run_side_by_side_in_a_process_with_a_loop(runner):
    async def both():
        events = [asyncio.Event(), asyncio.Event()]
        calls = [asyncio.create_task(runner.run_async("meet", (event,), {})) for event in events]
        await asyncio.gather(*(event.wait() for event in events))
        assert not any(call.done() for call in calls)
        return await asyncio.gather(*calls), await runner.run_async("ping", (3,), {})

    assert asyncio.run(both()) == (["met", "met"], 3)
