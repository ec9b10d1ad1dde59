"""A plan is a pure function's value: inspected, printed, and cheap for thousands of ranks."""

import pickle
import tracemalloc
from dataclasses import FrozenInstanceError

import pytest
import torch
from list_batch import ListBatch, ids
from tensordict import TensorDict

from kapell.decorators import Dispatch, GroupShape, MeshLayout, MethodSpec, make_plan

SHAPE = GroupShape(4, role="actor", meshes={"tp": MeshLayout((0, 0, 1, 1), (True, False, True, False))})
TP = Dispatch.mesh("tp")


def plan(*args, mode=TP, shape=SHAPE, **options):
    return make_plan("update", MethodSpec(dispatch_mode=mode, **options), shape, args)


def test_a_plan_says_which_rank_gets_which_rows():
    planned = plan(ids(5))
    assert [list(planned.rows_of(rank)) for rank in range(4)] == [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]]
    assert (planned.method, planned.role, planned.mode) == ("update", "actor", "mesh:tp")


def test_a_plan_of_nothing_to_split_has_no_rows():
    planned = plan({"lr": 1})
    assert planned.rows == (0, 0, 0, 0)
    assert list(planned.rows_of(1)) == []


def test_a_plan_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        plan(ids(2)).rows = ()


def test_results_can_be_collected_in_another_process():
    planned = plan(ListBatch({"cost": [3, 1, 1, 1]}), balance_by="cost")
    collector = pickle.loads(pickle.dumps(planned.collector))
    assert collector([[1, 2], [3, 4]]) == planned.collect([[1, 2], [3, 4]])


def test_ranks_that_do_not_run_have_no_call():
    planned = plan(1, mode=Dispatch.RANK_ZERO)
    with pytest.raises(ValueError, match="rank 1 does not run; 1 of 4 ranks do"):
        planned.call_for(1)


def test_planning_twice_gives_the_same_plan():
    batch = ids(7)
    first, second = plan(batch), plan(batch)
    assert (first.rows, first.ranks, first.collect_ranks) == (second.rows, second.ranks, second.collect_ranks)
    assert first.call_for(2)[0][0].data == second.call_for(2)[0][0].data


def test_shards_are_cut_when_they_are_asked_for():
    class Watched(ListBatch):
        cuts = 0

        def slice(self, start, end):
            Watched.cuts += 1
            return super().slice(start, end)

    planned = plan(Watched({"id": [0, 1, 2, 3]}))
    assert Watched.cuts == 0
    planned.call_for(0)
    assert Watched.cuts == 1


def test_the_table_shows_rows_columns_bytes_padding_and_replicas():
    batch = TensorDict({"a": torch.zeros(3, 256), "unread": torch.zeros(3)}, [3])
    planned = plan(batch, {"lr": 1}, reads=["a"], uneven="pad", padding_argument="num_padding")
    assert str(planned).splitlines() == [
        "actor.update: mesh:tp, 3 rows, 4 of 4 ranks run",
        "rank  rows  padding  columns  bytes    replicas",
        "0     2     0        a        2.1 KiB  args[0] x2, args[1] x4, num_padding x2",
        "1     2     0        a        2.1 KiB  args[0] x2, args[1] x4, num_padding x2",
        "2     1     1        a        2.1 KiB  args[0] x2, args[1] x4, num_padding x2",
        "3     1     1        a        2.1 KiB  args[0] x2, args[1] x4, num_padding x2",
    ]


def test_a_table_of_many_ranks_is_cut():
    lines = str(plan(list(range(5000)), mode=Dispatch.DP_COMPUTE_PROTO, shape=GroupShape(1000))).splitlines()
    assert lines[-1] == "... and 968 more ranks"
    assert len(lines) == 35


def test_a_large_plan_costs_memory_by_rank_not_by_row():
    batch = torch.arange(1_000_000)
    plan(batch, mode=Dispatch.DP_COMPUTE_PROTO, shape=GroupShape(4096))
    tracemalloc.start()
    try:
        planned = plan(batch, mode=Dispatch.DP_COMPUTE_PROTO, shape=GroupShape(4096))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * 2**20
    assert planned.rows[0] == 245
    assert planned.call_for(4095)[0][0].tolist() == list(range(1_000_000 - 244, 1_000_000))
