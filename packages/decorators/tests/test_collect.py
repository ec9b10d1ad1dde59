"""From results to one result: joining, reducing, and errors that name ranks and types."""

import math
from itertools import chain
from typing import ClassVar

import numpy as np
import pytest
import torch
from list_batch import ListBatch, ids

from kapell.decorators import (
    Dispatch,
    GroupShape,
    MeshLayout,
    MethodSpec,
    Metric,
    collect_all_to_all,
    collect_dp_compute,
    collect_dp_compute_data_proto,
    collect_nd_compute,
    collect_nd_compute_dataproto,
    dispatch_all_to_all,
    dispatch_dp_compute,
    dispatch_dp_compute_data_proto,
    dispatch_dp_compute_data_proto_with_func,
    dispatch_nd_compute,
    dispatch_nd_compute_dataproto,
    dispatch_one_to_all,
    get_predefined_dispatch_fn,
    make_plan,
)


def collect(outputs, how=None, *, rows=None, mode=Dispatch.DP_COMPUTE_PROTO):
    args = () if rows is None else ([0] * rows,)
    return make_plan("f", MethodSpec(dispatch_mode=mode, collect=how), GroupShape(len(outputs)), args).collect(outputs)


def test_rows_are_joined_by_default():
    assert collect([[1], [2, 3], []]) == [1, 2, 3]
    assert collect([ids(2), ids(0), ids(1)]).column("id") == [0, 1, 0]
    assert torch.equal(collect([torch.ones(1, 2), torch.zeros(0, 2)]), torch.ones(1, 2))


@pytest.mark.parametrize(
    "outputs",
    [
        [None, None],
        [1, 2.5],
        [np.float32(1), 2],
        [{"a": 1}, {"a": 2}],
        ["x", "y"],
        [torch.tensor(1.0), torch.tensor(2.0)],
    ],
)
def test_results_without_rows_become_a_list(outputs):
    assert collect(outputs) == outputs


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([ids(1), None], "ListBatch from rank 0; NoneType from rank 1"),
        ([None, ids(1), None], "NoneType from ranks 0, 2; ListBatch from rank 1"),
        ([ids(1), {"a": 1}], "ListBatch from rank 0; dict from rank 1"),
        ([[1], torch.ones(1)], "list from rank 0; Tensor from rank 1"),
        ([torch.ones(1), torch.tensor(1.0)], "Tensor from rank 0; Tensor without rows from rank 1"),
        ([1, None], "number from rank 0; NoneType from rank 1"),
    ],
)
def test_mixed_results_name_ranks_and_types(outputs, message):
    with pytest.raises(TypeError, match=f"f: results of different types cannot be joined: {message}"):
        collect(outputs)


def test_ranks_in_messages_are_those_of_the_group():
    shape = GroupShape(4, meshes={"m": MeshLayout((1, 1, 0, 0), (False, True, False, True))})
    planned = make_plan("f", MethodSpec(dispatch_mode=Dispatch.mesh("m")), shape, ([1, 2],))
    with pytest.raises(TypeError, match="list from rank 3; NoneType from rank 1"):
        planned.collect([[1], None])


def test_the_number_of_results_is_checked():
    planned = make_plan("f", MethodSpec(), GroupShape(2))
    with pytest.raises(ValueError, match="f: collects 2 results, got 1"):
        planned.collect([1])


@pytest.mark.parametrize(
    ("how", "expected"),
    [("mean", 2.5), ("sum", 5.0), ("max", 4.0), ("min", 1.0), ("first", 1.0), ("list", [1.0, 4.0])],
)
def test_numbers_are_reduced_as_declared(how, expected):
    assert collect([1.0, 4.0], how) == expected


def test_dicts_are_reduced_key_by_key():
    assert collect([{"a": 1, "d": {"b": 2}}, {"a": 3, "d": {"b": 4}}], "sum") == {"a": 4, "d": {"b": 6}}
    assert collect([{"a": 1}, {"a": 3, "b": 5}], "mean") == {"a": 2, "b": 5}


def test_a_mean_is_weighted_by_rows():
    assert collect([1.0, 4.0], "mean", rows=3) == 2.0
    assert collect([{"loss": 1.0}, {"loss": math.nan}], "mean", rows=1) == {"loss": 1.0}
    assert math.isnan(collect([1.0, 2.0], "mean", rows=0))


def test_a_mean_without_rows_weighs_ranks_alike():
    assert collect([1.0, 4.0], "mean", mode=Dispatch.ONE_TO_ALL) == 2.5


def test_metrics_carry_their_reduction_and_weight():
    outputs = [
        {
            "loss": Metric(1.0, weight=30),
            "tokens": Metric(30, "sum"),
            "longest": Metric(9, "max"),
            "rank": Metric(0, "list"),
        },
        {
            "loss": Metric(5.0, weight=10),
            "tokens": Metric(10, "sum"),
            "longest": Metric(7, "max"),
            "rank": Metric(1, "list"),
        },
    ]
    assert collect(outputs, "mean") == {"loss": 2.0, "tokens": 40, "longest": 9, "rank": [0, 1]}


def test_tensors_and_arrays_are_reduced_elementwise():
    assert torch.equal(collect([torch.tensor([1.0, 2]), torch.tensor([3.0, 4])], "mean"), torch.tensor([2.0, 3]))
    assert collect([np.array([1, 2]), np.array([3, 4])], "sum").tolist() == [4, 6]
    assert collect([torch.tensor(1), torch.tensor(3)], "max") == 3


def test_a_dict_of_lists_keeps_every_value():
    assert collect([{"a": 1, "b": Metric(2)}, {"a": 3}], "dict_of_lists") == {"a": [1, 3], "b": [2]}


@pytest.mark.parametrize(
    ("outputs", "how", "message"),
    [
        (["x", "y"], "mean", "result of rank 0 is str, which has no mean; it came as rank 0: str, rank 1: str"),
        ([1.0, None], "sum", "result of rank 1 is NoneType, which has no sum"),
        ([{"a": 1}, {"a": [1]}], "mean", "'a' of rank 1 is list, which has no mean"),
        ([{"a": 1}, 2], "dict_of_lists", "needs a dict from every rank: rank 0: dict, rank 1: int"),
        ([{"a": Metric(1)}, {"a": 1}], "mean", "'a' is not the same kind of metric on all ranks"),
        ([Metric(1, "sum"), Metric(1, "max")], "mean", "not the same kind of metric"),
        ([np.ones(2), np.ones(2)], "max", r"max joins numbers, got an array of shape \(2,\)"),
    ],
)
def test_what_cannot_be_reduced_is_named(outputs, how, message):
    with pytest.raises(TypeError, match=message):
        collect(outputs, how)


@pytest.mark.parametrize(
    ("options", "message"), [({"reduction": "concat"}, "not concat"), ({"weight": -1}, "negative")]
)
def test_impossible_metrics_are_refused_where_they_are_made(options, message):
    with pytest.raises(ValueError, match=message):
        Metric(1.0, **options)


def test_the_functions_of_the_modes_can_be_called():
    shape = GroupShape(2)
    assert dispatch_one_to_all(shape, 1, k=[2]) == (([1, 1],), {"k": [[2], [2]]})
    assert dispatch_all_to_all(shape, [1, 2], k=[3, 4]) == (([1, 2],), {"k": [3, 4]})
    assert dispatch_dp_compute(shape, [1, 2]) == (([1, 2],), {})
    assert dispatch_dp_compute_data_proto(shape, [1, 2, 3]) == (([[1, 2], [3]],), {})
    assert dispatch_dp_compute_data_proto_with_func(shape, len, [1, 2]) == (([len, len], [[1], [2]]), {})
    assert dispatch_nd_compute([1, 0], 2, shape, ["a", "b"], k=[1, 2]) == ((["b", "a"],), {"k": [2, 1]})
    assert dispatch_nd_compute_dataproto([1, 0], 2, shape, [7, 8]) == (([[8], [7]],), {})
    assert collect_all_to_all(shape, [1, 2]) == [1, 2]
    assert collect_dp_compute(shape, (1, 2)) == [1, 2]
    assert collect_dp_compute_data_proto(shape, [[1], [2]]) == [1, 2]
    assert collect_nd_compute([True, False], shape, [1, 2]) == [1]
    assert collect_nd_compute_dataproto([False, True], shape, [[1], [2]]) == [2]


def test_the_functions_of_the_modes_check_their_input():
    shape = GroupShape(2)
    with pytest.raises(ValueError, match="collected 1 outputs of a group of 2 ranks"):
        collect_dp_compute(shape, [1])
    with pytest.raises(ValueError, match="must be a list of 2 entries"):
        dispatch_nd_compute([1, 0], 2, shape, ["a"])
    with pytest.raises(ValueError, match="has 2 data-parallel ranks, not 3"):
        dispatch_nd_compute_dataproto([1, 0], 3, shape, [7, 8])
    with pytest.raises(NotImplementedError):
        get_predefined_dispatch_fn(Dispatch.DIRECT_ROLLOUT_METHOD)["dispatch_fn"](shape)
    assert get_predefined_dispatch_fn(Dispatch.RANK_ZERO)["dispatch_fn"](shape, 1) == ((1,), {})


def test_padding_of_the_functions_is_marked_and_dropped_by_a_custom_mode():
    pair = {"dispatch_fn": dispatch_dp_compute_data_proto, "collect_fn": collect_dp_compute_data_proto}
    planned = make_plan("f", MethodSpec(dispatch_mode=pair), GroupShape(2), (ids(3, auto_padding=True),))
    assert planned.padding_rows == (0, 1)
    doubled = [ListBatch({"x": [2 * row for row in planned.call_for(rank)[0][0].column("id")]}) for rank in range(2)]
    assert planned.collect(doubled).column("x") == [0, 2, 4]


class Counted(ListBatch):
    """Notes how many rows are joined."""

    joined: ClassVar[list[int]] = []

    def slice(self, start, end):
        return Counted({name: column[start:end] for name, column in self.data.items()}, self.meta_info)

    @staticmethod
    def concat(parts):
        Counted.joined.append(sum(map(len, parts)))
        return ListBatch.concat(parts)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "outputs",
    [
        [[1], [2, 3], [], [4, 5, 6]],
        [np.arange(3), np.arange(0), np.arange(9)],
        [torch.arange(4), torch.arange(1)],
        [1, 2, 3],
        [[7, 8]],
    ],
)
def test_parts_of_a_result_are_the_result_cut(outputs, count):
    collector = make_plan("f", MethodSpec(dispatch_mode=Dispatch.DP_COMPUTE_PROTO), GroupShape(len(outputs))).collector
    whole = list(collector(outputs))
    parts = [list(collector.part(outputs, index, count)) for index in range(count)]
    assert list(chain.from_iterable(parts)) == whole
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("options", [{"uneven": "pad"}, {"balance_by": "id"}])
def test_parts_of_a_result_have_no_padding_and_the_callers_order(options):
    plan = make_plan("f", MethodSpec(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, **options), GroupShape(2), (ids(5),))
    outputs = [plan.call_for(rank)[0][0] for rank in range(2)]
    parts = [plan.collector.part(outputs, index, 3) for index in range(3)]
    assert [part.column("id") for part in parts] == [[0, 1], [2, 3], [4]]


def test_only_the_rows_of_the_part_are_joined():
    collector = make_plan("f", MethodSpec(dispatch_mode=Dispatch.DP_COMPUTE_PROTO), GroupShape(2)).collector
    outputs = [Counted({"id": list(range(start, start + 6))}) for start in (0, 6)]
    Counted.joined.clear()
    assert collector.part(outputs, 1, 4).column("id") == [3, 4, 5]
    assert Counted.joined == [3]


def test_a_part_of_one_output_is_a_copy_of_its_rows():
    collector = make_plan("f", MethodSpec(dispatch_mode=Dispatch.DP_COMPUTE_PROTO), GroupShape(1)).collector
    output = np.arange(5)
    part = collector.part([output], 1, 2)
    part[:] = -1
    assert (len(part), output.tolist()) == (2, [0, 1, 2, 3, 4])


def test_what_has_no_rows_comes_whole_as_a_part():
    plan = make_plan("f", MethodSpec(dispatch_mode=Dispatch.RANK_ZERO), GroupShape(2))
    assert plan.collector.part([5], 0, 2) == 5
