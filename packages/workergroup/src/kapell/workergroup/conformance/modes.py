# ruff: noqa: D103 - a test's name is its sentence
"""Each dispatch mode lays its arguments out as it says, and results come back in order."""

from __future__ import annotations

import pytest

from kapell.decorators import Dispatch, Replicate

from ..group import WorkerGroup
from .workers import label_rows

__all__ = [
    "test_all_to_all_gives_each_rank_its_entry",
    "test_all_to_all_refuses_another_number_of_entries",
    "test_configs_beside_the_rows_reach_every_rank",
    "test_custom_mode_is_a_pair_of_functions",
    "test_custom_mode_may_give_the_next_call_its_argument",
    "test_direct_method_is_refused_through_the_group",
    "test_dp_compute_gives_each_rank_its_entry",
    "test_function_runs_on_rank_zero_alone",
    "test_function_runs_over_split_rows",
    "test_mesh_mode_sends_one_shard_to_peers_and_collects_once",
    "test_mesh_that_nobody_registered_is_refused_by_name",
    "test_metrics_come_back_as_a_list_by_rank",
    "test_one_to_all_gives_every_rank_the_whole_value",
    "test_one_to_all_never_scatters_a_list_of_world_size",
    "test_option_dispatch_changes_the_mode_of_one_call",
    "test_plan_says_who_gets_what_and_runs_nothing",
    "test_rank_zero_modes_run_rank_zero_alone",
    "test_replicate_gives_all_ranks_the_whole_list",
    "test_rows_are_split_and_joined_in_order",
    "test_rows_by_keyword_and_by_position_agree",
]


def test_one_to_all_gives_every_rank_the_whole_value(group: WorkerGroup) -> None:
    assert group.place() == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert group.echo({"a": [1, 2]}) == [{"a": [1, 2]}] * 4


def test_one_to_all_never_scatters_a_list_of_world_size(group: WorkerGroup) -> None:
    assert group.echo([1, 2, 3, 4]) == [[1, 2, 3, 4]] * 4


def test_all_to_all_gives_each_rank_its_entry(group: WorkerGroup) -> None:
    assert group.add([1, 2, 3, 4], other=[5, 6, 7, 8]) == [16, 18, 20, 22]


def test_all_to_all_refuses_another_number_of_entries(group: WorkerGroup) -> None:
    with pytest.raises(ValueError, match="3 entries"):
        group.add([1, 2, 3])


def test_replicate_gives_all_ranks_the_whole_list(group: WorkerGroup) -> None:
    assert group.add([1, 2, 3, 4], Replicate(100)) == [111, 112, 113, 114]


def test_dp_compute_gives_each_rank_its_entry(group: WorkerGroup) -> None:
    assert group.compute(["a", "b", "c", "d"]) == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]


@pytest.mark.parametrize("num_rows", [1, 4, 10, 146])
def test_rows_are_split_and_joined_in_order(group: WorkerGroup, num_rows: int) -> None:
    rows = list(range(num_rows))
    labelled = group.labelled_rows(rows)
    assert [row for _, row in labelled] == rows
    assert sorted(rank for rank, _ in labelled) == [rank for rank, _ in labelled]


def test_rows_by_keyword_and_by_position_agree(group: WorkerGroup) -> None:
    rows = list(range(6))
    assert (
        group.rows(rows, 2) == group.rows(rows=rows, scale=2) == group.rows(scale=2, rows=rows) == [0, 2, 4, 6, 8, 10]
    )


def test_configs_beside_the_rows_reach_every_rank(group: WorkerGroup) -> None:
    assert group.rows([1, 2, 3, 4, 5], config={"offset": 10}) == [11, 12, 13, 14, 15]


def test_metrics_come_back_as_a_list_by_rank(group: WorkerGroup) -> None:
    assert group.total([1, 2, 3, 4]) == [1, 2, 3, 4]


def test_rank_zero_modes_run_rank_zero_alone(group: WorkerGroup) -> None:
    assert group.first_only([7]) == (0, [7])
    assert group.first_adds(1, other=2) == 13


def test_direct_method_is_refused_through_the_group(group: WorkerGroup) -> None:
    with pytest.raises(NotImplementedError, match="direct"):
        group.direct()


def test_custom_mode_is_a_pair_of_functions(group: WorkerGroup) -> None:
    assert group.custom([1, 10]) == 22


def test_custom_mode_may_give_the_next_call_its_argument(group: WorkerGroup) -> None:
    pending = group.custom.options(blocking=False)([1, 10])
    assert group.echo(pending) == [22] * 4
    assert group.echo(group.custom.options(blocking=False)([pending, pending])) == [88] * 4
    assert pending.get() == 22


def test_mesh_mode_sends_one_shard_to_peers_and_collects_once(group: WorkerGroup) -> None:
    assert group.mesh_rows([5, 6, 7, 8]) == [(0, 5), (0, 6), (2, 7), (2, 8)]
    assert group.mesh_rows.plan([5, 6]).rows == (1, 1, 1, 1)
    assert group._dispatch_info["train"] == [0, 0, 1, 1]


def test_mesh_that_nobody_registered_is_refused_by_name(group: WorkerGroup) -> None:
    with pytest.raises((ValueError, KeyError), match="nowhere"):
        group.lost_in_mesh([1])


def test_function_runs_over_split_rows(group: WorkerGroup) -> None:
    assert group.execute_with_func_generator(label_rows, [5, 6, 7, 8]) == [(0, 5), (1, 6), (2, 7), (3, 8)]


def test_function_runs_on_rank_zero_alone(group: WorkerGroup) -> None:
    assert group.execute_func_rank_zero(max, [3, 9, 4]) == 9


def test_option_dispatch_changes_the_mode_of_one_call(group: WorkerGroup) -> None:
    assert group.echo.options(dispatch=Dispatch.ALL_TO_ALL)([1, 2, 3, 4]) == [1, 2, 3, 4]
    assert group.echo([1]) == [[1]] * 4


def test_plan_says_who_gets_what_and_runs_nothing(group: WorkerGroup) -> None:
    group.set_value(1)
    plan = group.set_value.plan(2)
    assert plan.ranks == (0, 1, 2, 3)
    assert group.rows.plan(list(range(10))).rows == (3, 3, 2, 2)
    assert "rows" in str(plan)
    assert group.get_value() == [1, 1, 1, 1]
