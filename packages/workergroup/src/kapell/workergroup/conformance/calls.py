# ruff: noqa: D103 - a test's name is its sentence
"""How calls are made and their results awaited; arguments and results are private to whoever has them."""

from __future__ import annotations

import asyncio
import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from ..errors import CallTimeoutError
from ..group import WorkerGroup
from .workers import Note, NoteElsewhere

__all__ = [
    "test_arguments_are_checked_before_anything_is_sent",
    "test_async_iteration_gives_every_rank",
    "test_async_methods_give_values_blocking_and_not",
    "test_awaiting_a_call_gives_its_result",
    "test_bytes_come_back_as_they_are_whatever_they_say",
    "test_call_can_be_awaited_and_made_inside_an_event_loop",
    "test_call_over_its_timeout_says_which_ranks_are_busy_since_when",
    "test_call_that_runs_while_stats_are_asked_for_is_accounted",
    "test_calls_are_accounted_per_rank",
    "test_changes_of_the_caller_after_the_call_do_not_reach_the_worker",
    "test_changes_of_the_worker_do_not_reach_the_caller_or_other_workers",
    "test_every_entry_of_a_small_value_is_accounted",
    "test_execute_all_runs_any_method_on_all_ranks",
    "test_execute_rank_zero_runs_any_method_on_rank_zero",
    "test_finished_results_come_first",
    "test_option_blocking_chooses_per_call",
    "test_pending_call_can_be_asked_and_got_repeatedly",
    "test_pending_call_is_an_argument_of_the_next_call",
    "test_ranks_may_wait_for_each_other_where_they_run_side_by_side",
    "test_results_by_reference_stay_until_they_are_read",
    "test_results_by_reference_that_cannot_stay_come_as_they_are",
    "test_results_keep_rank_order_whatever_order_they_finish_in",
]


def test_option_blocking_chooses_per_call(group: WorkerGroup) -> None:
    assert group.echo.options(blocking=False)(1).get() == [1] * 4
    assert group.echo_later(2).get() == [2] * 4
    assert group.echo_later.options(blocking=True)(3) == [3] * 4


@pytest.mark.parametrize("size", [0, 1000, 90_000, 200_000, 3_000_000])
@pytest.mark.parametrize("blocking", [True, False])
def test_bytes_come_back_as_they_are_whatever_they_say(group: WorkerGroup, size: int, blocking: bool) -> None:
    echo = group.echo.options(blocking=blocking)
    for value in (bytes(size), pickle.dumps("x" * size), bytearray(size)):
        echoed = echo(value) if blocking else echo(value).get()
        assert echoed == [value] * 4
        assert {type(one) for one in echoed} == {type(value)}


def test_pending_call_can_be_asked_and_got_repeatedly(group: WorkerGroup) -> None:
    pending = group.echo_later([1])
    result = pending.get(timeout=60)
    assert pending.done()
    assert result == [[1]] * 4
    assert pending.get() is result


def test_awaiting_a_call_gives_its_result(group: WorkerGroup) -> None:
    async def both() -> tuple[Any, Any]:
        first, second = group.echo_later(1), group.echo_later(2)
        return await first, await second

    assert list(asyncio.run(both())) == [[1] * 4, [2] * 4]


def test_finished_results_come_first(group: WorkerGroup, concurrent: bool, tmp_path: Path) -> None:
    last = tmp_path / "the others have answered"
    if not concurrent:
        last.touch()
    order = []
    for rank, _ in group.wait_for.options(blocking=False)([str(last), "", "", ""]).as_completed(timeout=120):
        order.append(rank)
        if len(order) == 3:
            last.touch()
    assert sorted(order) == [0, 1, 2, 3]
    assert not concurrent or order[-1] == 0


def test_ranks_may_wait_for_each_other_where_they_run_side_by_side(
    group: WorkerGroup, concurrent: bool, tmp_path: Path
) -> None:
    assert group.concurrent == concurrent
    assert group[0].concurrent  # it has no others to wait for
    met = group.meet(str(tmp_path), seconds=120.0 if concurrent else 0.0)
    assert met == [concurrent, concurrent, concurrent, True]


def test_async_iteration_gives_every_rank(group: WorkerGroup) -> None:
    async def ranks() -> dict[int, Any]:
        return {rank: value async for rank, value in group.echo_later("x")}

    assert asyncio.run(ranks()) == dict.fromkeys(range(4), "x")


def test_results_keep_rank_order_whatever_order_they_finish_in(group: WorkerGroup) -> None:
    assert group.nap([0.3, 0.2, 0.1, 0.0]) == [0, 1, 2, 3]
    assert group.nap.options(blocking=False)([0.3, 0.2, 0.1, 0.0]).get() == [0, 1, 2, 3]


def test_pending_call_is_an_argument_of_the_next_call(group: WorkerGroup) -> None:
    doubled = group.rows.options(blocking=False)(list(range(10)), 2)
    assert group.rows(doubled, scale=10) == [20 * row for row in range(10)]
    assert group.echo(group.echo_later(5)) == [[5] * 4] * 4


def test_results_by_reference_stay_until_they_are_read(group: WorkerGroup) -> None:
    notes = group.by_reference().note()
    assert [type(note) for note in notes] == [NoteElsewhere] * 4
    assert [note.get().lines for note in notes] == [[0], [1], [2], [3]]
    assert group.sign(notes[::-1]) == [[3, 0], [2, 1], [1, 2], [0, 3]]
    assert [note.get().lines for note in notes] == [[0], [1], [2], [3]]  # what others got was theirs alone
    later = group[1:3].by_reference().note_later.options(blocking=False)
    assert [note.get().lines for note in later().get()] == [[1], [2]]
    assert group[1:3].sign(later()) == [[1, 1], [2, 2]]
    assert [type(note) for note in group.note()] == [Note] * 4


def test_results_by_reference_that_cannot_stay_come_as_they_are(group: WorkerGroup) -> None:
    assert group.by_reference().echo([1, "two"]) == [[1, "two"]] * 4
    assert group.by_reference().rows(list(range(5)), scale=2) == [0, 2, 4, 6, 8]


def test_async_methods_give_values_blocking_and_not(group: WorkerGroup) -> None:
    expected = [(0, 5), (1, 6), (2, 7), (3, 8)]
    assert group.async_rows([5, 6, 7, 8]) == expected
    assert group.async_rows.options(blocking=False)([5, 6, 7, 8]).get() == expected


def test_call_can_be_awaited_and_made_inside_an_event_loop(group: WorkerGroup) -> None:
    async def call() -> Any:
        blocking = group.async_rows([1, 2, 3, 4])
        return blocking, await group.async_rows.options(blocking=False)([1, 2, 3, 4])

    first, second = asyncio.run(call())
    assert first == second == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_execute_all_runs_any_method_on_all_ranks(group: WorkerGroup) -> None:
    expected = [(0, [1, 2]), (1, [1, 2]), (2, [1, 2]), (3, [1, 2])]
    assert group.execute_all_sync("unlabelled", value=[1, 2]) == expected
    assert group.execute_all_async("unlabelled", [1, 2]).get() == expected
    assert group.execute_all("unlabelled", [1, 2]).get() == expected


def test_execute_rank_zero_runs_any_method_on_rank_zero(group: WorkerGroup) -> None:
    assert group.execute_rank_zero_sync("unlabelled", [1]) == (0, [1])
    assert group.execute_rank_zero_async("unlabelled", value=[1]).get() == (0, [1])
    assert group.execute_rank_zero("unlabelled").get() == (0, None)


def test_arguments_are_checked_before_anything_is_sent(group: WorkerGroup) -> None:
    group.set_value(3)
    with pytest.raises(TypeError, match="did you mean 'value'"):
        group.set_value(valeu=4)
    with pytest.raises(TypeError):
        group.set_value()
    assert group.get_value() == [3] * 4


def test_changes_of_the_worker_do_not_reach_the_caller_or_other_workers(group: WorkerGroup) -> None:
    values = [10]
    assert group.append_rank(values) == [[10, 0], [10, 1], [10, 2], [10, 3]]
    assert values == [10]
    for result in group.keep([1]):
        result.append("mine")
    assert group.kept_value() == [[1]] * 4


def test_changes_of_the_caller_after_the_call_do_not_reach_the_worker(group: WorkerGroup) -> None:
    values: list[list[Any]] = [[1], [2]]
    group.keep(values)
    pending = group.echo_later(values)
    values[0].append("later")
    assert pending.get() == [[[1], [2]]] * 4
    assert group.kept_value() == [[[1], [2]]] * 4


def test_call_over_its_timeout_says_which_ranks_are_busy_since_when(
    group: WorkerGroup, concurrent: bool, tmp_path: Path
) -> None:
    if not concurrent:
        pytest.skip("a call of this backend is over before it can be waited for")
    release = tmp_path / "release"
    before = time.time()
    with pytest.raises(CallTimeoutError, match=r"did not finish within 0\.5 s") as caught:
        group.wait_for.options(timeout=0.5)(["", "", str(release), ""])
    assert isinstance(caught.value, TimeoutError)
    assert 2 in caught.value.busy
    release.touch()

    release = tmp_path / "release again"
    pending = group.wait_for.options(blocking=False)(["", "", str(release), ""])
    while pending.busy_ranks() != [2]:
        time.sleep(0.01)
    with pytest.raises(CallTimeoutError, match="1 are still busy") as caught:
        pending.get(timeout=0.1)
    release.touch()
    assert list(caught.value.busy) == [2]
    assert caught.value.results == {0: 0, 1: 1, 3: 3}
    assert before <= caught.value.busy[2].since <= time.time()
    assert caught.value.busy[2].seconds >= 0.1
    assert pending.get(timeout=120) == [0, 1, 2, 3]  # the call went on, and the group is as before


def test_call_that_runs_while_stats_are_asked_for_is_accounted(
    fragile_group: WorkerGroup, concurrent: bool, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    if not concurrent:
        release.touch()
    pending = fragile_group.wait_for.options(blocking=False)([str(release), ""])
    fragile_group.stats()
    release.touch()
    pending.get(timeout=120)
    fragile_group.nap([0.01, 0.01])
    stats = fragile_group.stats()
    assert all(rank.run > 0 for method in ("wait_for", "nap") for rank in stats[method].ranks)


def test_every_entry_of_a_small_value_is_accounted(fragile_group: WorkerGroup) -> None:
    fragile_group.echo({"a": "x", "b": "x" * 10_000})
    fragile_group.echo(["x", "x" * 10_000])
    assert all(min(rank.bytes_in, rank.bytes_out) >= 20_000 for rank in fragile_group.stats()["echo"].ranks)


def test_calls_are_accounted_per_rank(group: WorkerGroup) -> None:
    group.nap([0.1, 0.0, 0.0, 0.0])
    group.echo("x" * 10_000)
    stats = group.stats()
    assert stats["nap"].slowest.run >= 0.1
    assert [rank.rank for rank in stats["echo"].ranks] == [0, 1, 2, 3]
    assert all(rank.bytes_in >= 10_000 and rank.bytes_out >= 10_000 for rank in stats["echo"].ranks)
    assert "echo" in str(stats)
    assert {event["tid"] for event in group.trace_events() if event["ph"] == "X"} == {0, 1, 2, 3, 4}
