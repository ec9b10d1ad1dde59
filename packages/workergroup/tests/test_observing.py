import json

import pytest

from kapell.decorators import Dispatch, register
from kapell.workergroup import (
    ClassWithInitArgs,
    LocalBackend,
    LocalWorkerGroup,
    ResourcePool,
    RunTime,
    Worker,
    save_trace,
)


class Sizer(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, rows):
        return rows + rows

    @register(Dispatch.ONE_TO_ALL)
    def length(self, text):
        return len(text)

    @register(Dispatch.ONE_TO_ALL)
    def fail(self):
        raise ValueError("no")


def test_stats_sum_up_calls_by_method_and_rank():
    with LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Sizer), role="sizer") as group:
        for _ in range(3):
            group.double([b"x" * 1000, b"y" * 1000])
        stats = group.stats()
    double = stats["double"]
    assert (double.calls, double.failed, stats.num_calls) == (3, 0, 3)
    assert [rank.calls for rank in double.ranks] == [3, 3]
    assert all((rank.bytes_in, rank.bytes_out) == (3000, 6000) for rank in double.ranks)
    assert all(min(rank.serialize, rank.queue, rank.run, rank.collect) >= 0.0 for rank in double.ranks)
    assert double.seconds >= max(rank.run for rank in double.ranks)
    assert str(stats).splitlines()[2].split()[:3] == ["sizer", "double", "3"]


def test_what_went_through_the_controller_counts_each_value_once_and_only_what_came_back():
    with LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Sizer)) as group:
        group.length(b"x" * 1000)
        group.double([b"z" * 100] * 2)
        never_collected = group.double.options(blocking=False)([b"z" * 100] * 2)
        stats = group.stats()
        del never_collected
    assert (stats["length"].sent, stats["length"].fetched) == (1000, 2 * 8)
    assert [rank.bytes_in for rank in stats["length"].ranks] == [1000, 1000]
    assert (stats["double"].sent, stats["double"].fetched) == (400, 400)


def test_stats_count_failed_calls_and_survive_close():
    with LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Sizer)) as group:
        with pytest.raises(ExceptionGroup):
            group.fail()
        group.stats()
    assert group.stats()["fail"].failed == 1


def test_accounts_are_bounded():
    from kapell.workergroup import accounting

    ledger = accounting.Ledger()
    for _ in range(20):
        record = ledger.open("role", "method", 0.0, range(4096))
        record.sending = [0.0] * 4097
    assert ledger.num_calls == 20
    assert sum(len(record.ranks) for record in ledger.records) <= 65_536


def test_calls_that_another_program_made_on_the_same_workers_are_not_taken_for_ones_own():
    from kapell.workergroup.accounting import Ledger

    ledger, other = Ledger(), Ledger()
    record = ledger.open("role", "method", 0.0, [0])
    assert other.open("role", "other", 0.0, [0]).number == record.number == 1
    own = RunTime(ledger.first + 1, 0.0, 1.0)
    ledger.add_run_times({0: [own, RunTime(other.first + 1, 0.0, 9.0)]})
    assert record.runs == {0: own}


def test_trace_opens_in_perfetto_with_a_row_for_each_rank(tmp_path):
    with LocalBackend() as backend:
        sizer = ClassWithInitArgs(Sizer)
        one = backend.worker_group(backend.resource_pool([2]), sizer, role="one", mode="threads")
        two = backend.worker_group(backend.resource_pool([3]), sizer, role="two")
        one.double([1, 2])
        two.double([1, 2, 3])
        save_trace(tmp_path / "trace.json", [one, two])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    # What Perfetto needs of the JSON format: a phase, a process and a thread for each, times for spans.
    assert all({"ph", "name", "pid", "tid"} <= event.keys() for event in events)
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] > 0 and event["dur"] >= 0 for event in spans)
    rows = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert [rows[1, row] for row in range(3)] == ["controller", "rank 0", "rank 1"]
    assert rows[2, 3] == "rank 2"
    assert {(event["pid"], event["tid"]) for event in spans if event["name"] == "two.double"} == {
        (2, 0), (2, 1), (2, 2), (2, 3),
    }  # fmt: skip
    call = next(event for event in spans if event["name"] == "two.double" and event["tid"] == 0)
    runs = [event for event in spans if event["name"] == "two.double" and event["tid"] > 0]
    assert all(call["ts"] <= run["ts"] and run["ts"] + run["dur"] <= call["ts"] + call["dur"] for run in runs)
