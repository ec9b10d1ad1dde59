"""Uneven batches: shards or padding, marked for the worker and dropped on collect."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from list_batch import ListBatch, ids, run

from kapell.decorators import Dispatch, GroupShape, MeshLayout, MethodSpec, Metric, make_plan

WORLD = GroupShape(4)
TP = GroupShape(4, role="actor", meshes={"tp": MeshLayout((0, 0, 1, 1), (True, False, True, False))})


def plan(*args, shape=WORLD, mode=Dispatch.DP_COMPUTE_PROTO, **options):
    return make_plan("f", MethodSpec(dispatch_mode=mode, **options), shape, args)


@pytest.mark.parametrize(("num_rows", "rows"), [(5, (2, 1, 1, 1)), (1, (1, 0, 0, 0)), (0, (0, 0, 0, 0)), (8, (2,) * 4)])
def test_without_a_declaration_shards_are_uneven_and_every_rank_runs(num_rows, rows):
    planned = plan(ids(num_rows))
    assert (planned.rows, planned.padding_rows, planned.ranks) == (rows, (0,) * 4, (0, 1, 2, 3))
    assert run(planned, lambda batch: batch).column("id") == list(range(num_rows))


@pytest.mark.parametrize(("num_rows", "padding"), [(5, (0, 1, 1, 1)), (1, (0, 1, 1, 1)), (4, (0,) * 4), (0, (0,) * 4)])
@pytest.mark.parametrize("asked", ["method", "batch"])
def test_padding_fills_shards_to_one_size(num_rows, padding, asked):
    batch = ids(num_rows, auto_padding=asked == "batch")
    planned = plan(batch, uneven="pad" if asked == "method" else "shards")
    assert planned.padding_rows == padding
    sizes = {len(planned.call_for(rank)[0][0]) for rank in range(4)}
    assert len(sizes) == 1
    assert run(planned, lambda part: part).column("id") == list(range(num_rows))


def test_the_worker_sees_which_rows_are_padding():
    planned = plan(ids(5), uneven="pad")
    seen = [(part.column("id"), part.padding_mask) for (part,), _ in map(planned.call_for, range(4))]
    assert seen == [([0, 1], [False, False])] + [([row, row], [False, True]) for row in (2, 3, 4)]


def test_a_shard_of_padding_only_is_all_marked():
    (part,), _ = plan(ids(1), uneven="pad").call_for(3)
    assert (part.column("id"), part.padding_mask) == ([0], [True])


def test_padding_by_keyword_twice_and_beside_another_batch():
    batch, other = ids(5), ListBatch({"x": list("abcde")})
    spec = MethodSpec(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, uneven="pad")
    planned = make_plan("f", spec, WORLD, (), {"a": batch, "b": batch, "c": other})
    result = run(planned, lambda a, b, c: ListBatch(a.data | c.data) if a.data == b.data else None)
    assert result.data == {"id": [0, 1, 2, 3, 4], "x": list("abcde")}
    assert (len(batch), len(other)) == (5, 5)


def test_unequal_lengths_are_refused_before_anything_is_padded():
    first, second = ids(5, auto_padding=True), ids(6, auto_padding=True)
    with pytest.raises(ValueError, match=r"has 5 rows, .* has 6 rows"):
        plan(first, second)
    assert (len(first), len(second)) == (5, 6)


def test_padded_rows_are_dropped_by_their_mark_also_with_several_rows_a_row():
    def sample_twice(part):
        return part.select_idxs([row for row in range(len(part)) for _ in range(2)])

    assert run(plan(ids(5), uneven="pad"), sample_twice).column("id") == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_padded_rows_of_a_new_batch_are_dropped_by_position():
    result = run(plan(ids(5), uneven="pad"), lambda part: ListBatch({"double": [2 * row for row in part.column("id")]}))
    assert result.column("double") == [0, 2, 4, 6, 8]


def test_a_result_in_which_padding_cannot_be_told_is_refused():
    with pytest.raises(ValueError, match=r"rank 1 returned 3 rows for 2, .* cannot be told"):
        run(plan([1, 2, 3], shape=GroupShape(2), uneven="pad", padding_argument="n"), lambda x, n: [0] * 3)


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
def test_types_without_a_place_for_marks_tell_the_worker_by_an_argument(make):
    planned = plan(make([1, 2, 3, 4, 5]), uneven="pad", padding_argument="num_padding")
    assert [planned.call_for(rank)[1]["num_padding"] for rank in range(4)] == [0, 1, 1, 1]
    back = run(planned, lambda x, num_padding: x)
    assert list(back) == [1, 2, 3, 4, 5]
    assert len(plan(make([1]), uneven="pad", padding_argument="n").call_for(3)[0][0]) == 1


def test_types_without_a_place_for_marks_are_not_padded_in_secret():
    with pytest.raises(TypeError, match=r"list has no place to mark padded rows; .*padding_argument="):
        plan([1, 2, 3], uneven="pad")


def test_the_padding_argument_is_zero_when_nothing_is_padded():
    planned = plan([1, 2, 3, 4], uneven="pad", padding_argument="n")
    assert [planned.call_for(rank)[1] for rank in range(4)] == [{"n": 0}] * 4


def test_a_metric_collect_drops_padding_and_no_workers_result():
    planned = plan(ids(5), mode=Dispatch.DP_COMPUTE_METRIC, uneven="pad")
    assert run(planned, lambda part: {"rows": len(part)}) == [{"rows": 2}] * 4
    assert run(planned, lambda part: [1.0, 2.0]) == [[1.0, 2.0]] * 4
    assert [part.column("id") for part in run(planned, lambda part: part)] == [[0, 1], [2], [3], [4]]


def test_padding_never_reaches_a_mean():
    def loss(part):
        real = [value for value, padded in zip(part.column("id"), part.padding_mask, strict=True) if not padded]
        return {"id": sum(real) / len(real) if real else float("nan"), "max": max(part.column("id"))}

    for num_rows in (1, 2, 5, 6, 7):
        planned = plan(ids(num_rows), uneven="pad", collect="mean")
        assert run(planned, loss)["id"] == pytest.approx(sum(range(num_rows)) / num_rows)


@pytest.mark.parametrize("reduction", ["sum", "max", "min", "mean"])
def test_a_rank_of_padding_only_counts_in_no_reduction(reduction):
    def work(part):
        return Metric(100.0 if all(part.padding_mask) else 1.0, reduction, 5)

    assert run(plan(ids(1), uneven="pad", collect=reduction), work) == 1.0


def test_refuse_names_rows_shards_and_world():
    with pytest.raises(ValueError, match=r"3 rows cannot be split into 2 equal shards .*size 2, world size 4"):
        plan(ids(3), shape=TP, mode=Dispatch.mesh("tp"), uneven="refuse")
    assert plan(ids(2), shape=TP, mode=Dispatch.mesh("tp"), uneven="refuse").rows == (1, 1, 1, 1)


def test_the_divisor_is_the_data_parallel_size():
    planned = plan(ids(2), shape=TP, mode=Dispatch.mesh("tp"), uneven="pad")
    assert [planned.call_for(rank)[0][0].column("id") for rank in range(4)] == [[0], [0], [1], [1]]
    assert planned.padding_rows == (0, 0, 0, 0)
    assert plan(ids(3), shape=TP, mode=Dispatch.mesh("tp"), uneven="pad").padding_rows == (0, 0, 1, 1)


def test_a_zero_row_part_merges_without_loss_of_columns_or_dtype():
    back = run(plan(torch.tensor([1.5], dtype=torch.float64)), lambda x: x[:0] if len(x) else x)
    assert (back.shape, back.dtype) == ((0,), torch.float64)
    assert run(plan(ids(1)), lambda part: part).columns == ("id",)


@given(st.integers(0, 20), st.integers(1, 7), st.booleans())
def test_padded_calls_give_what_uneven_ones_give(num_rows, world, metric):
    mode = Dispatch.DP_COMPUTE_METRIC if metric else Dispatch.DP_COMPUTE_PROTO
    results = []
    for uneven in ("shards", "pad"):
        planned = make_plan("f", MethodSpec(dispatch_mode=mode, uneven=uneven), GroupShape(world), (ids(num_rows),))
        result = run(planned, lambda part: part)
        results.append([part.column("id") for part in result] if metric else result.column("id"))
    assert results[0] == results[1]
