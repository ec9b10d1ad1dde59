"""A planner used again and again: what it has kept of earlier calls never decides a later one wrongly."""

import pytest
from list_batch import ids

from kapell.decorators import (
    CallPlanner,
    Dispatch,
    GroupShape,
    MethodSpec,
    Replicate,
    make_plan,
    register_dispatch_mode,
    register_splitter,
    signature_of,
    update_dispatch_mode,
)

ROWS = MethodSpec(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)


class Worker:
    def update(self, rows: list = 0, scale=1):
        return rows


def planner(spec=ROWS, world_size=2, **options):
    return CallPlanner("update", spec, GroupShape(world_size), **options)


def shards(plan):
    return [plan.call_for(rank) for rank in plan.ranks]


def test_each_call_is_planned_as_if_it_were_the_first():
    plan = planner()
    calls = [
        (([1, 2, 3],), {}),
        (([1, 2, 3, 4],), {}),
        (([1],), {"scale": 2}),
        ((Replicate([1]), [5, 6]), {}),
        ((ids(5),), {}),
        (("text", [1, 2, 3]), {}),
        (([],), {}),
    ]
    for args, kwargs in calls * 2:
        again, first = plan(args, kwargs), make_plan("update", ROWS, GroupShape(2), args, kwargs)
        assert again.rows == first.rows
        assert again.columns == first.columns
        assert str(again) == str(first)
        assert again.collect([[1], [2]]) == first.collect([[1], [2]]) == [1, 2]


def test_arguments_of_known_types_may_still_differ_in_length():
    plan = planner()
    plan(([1, 2], [3, 4]), {})
    with pytest.raises(ValueError, match="different lengths"):
        plan(([1, 2], [3]), {})


def test_rows_that_cannot_be_split_are_refused_at_each_call():
    plan = planner(MethodSpec(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, uneven="refuse"))
    assert plan(([1, 2],), {}).rows == (1, 1)
    for _ in range(2):
        with pytest.raises(ValueError, match="3 rows cannot be split"):
            plan(([1, 2, 3],), {})


def test_a_value_that_passes_by_being_the_default_says_nothing_about_its_type():
    plan = planner(signature=signature_of(Worker, "update"))
    assert plan((0,), {}).call_for(0) == ((0,), {})
    with pytest.raises(TypeError, match="must be list, got int"):
        plan((7,), {})


def test_columns_in_the_entries_of_a_list_are_seen():
    plan = planner(MethodSpec(dispatch_mode=Dispatch.ALL_TO_ALL))
    assert plan(([1, 2],), {}).columns == ()
    assert plan(([ids(1), ids(2)],), {}).columns == ids(1).columns


def test_a_batch_that_asks_for_padding_is_padded_although_its_like_was_not():
    plan = planner()
    assert plan((ids(3),), {}).padding_rows == (0, 0)
    assert plan((ids(3, auto_padding=True),), {}).padding_rows == (0, 1)


def test_a_type_that_is_registered_after_a_call_is_split_in_the_next():
    class Rows:
        def __init__(self, items):
            self.items = items

    plan = planner()
    rows = Rows([1, 2])
    assert [args[0] for args, _ in shards(plan((rows,), {}))] == [rows, rows]
    register_splitter(
        Rows,
        length=lambda value: len(value.items),
        take=lambda value, places: Rows([value.items[place] for place in places]),
        cut=lambda value, start, stop: Rows(value.items[start:stop]),
        join=lambda parts: parts,
    )
    assert [args[0].items for args, _ in shards(plan((rows,), {}))] == [[1], [2]]


def test_a_mode_that_is_updated_after_a_call_is_used_in_the_next():
    def to_all(value):
        return lambda group, x: (([value] * group.world_size,), {})

    mode = register_dispatch_mode("PLANNED_TWICE", to_all("old"), lambda group, outputs: outputs)
    plan = planner(MethodSpec(dispatch_mode=mode))
    assert plan((1,), {}).call_for(0) == (("old",), {})
    update_dispatch_mode(mode, to_all("new"), lambda group, outputs: "collected")
    assert plan((1,), {}).call_for(0) == (("new",), {})
    assert plan((1,), {}).collect([1, 2]) == "collected"


def test_a_plan_keeps_its_arguments_when_the_next_call_is_planned():
    plan = planner()
    first = plan(([1, 2],), {})
    plan(([3, 4],), {})
    assert shards(first) == [(([1],), {}), (([2],), {})]
