# ruff: noqa: D103 - a test's name is its sentence
"""A failing call says which ranks failed, where they stood and how, promptly; the group lives on."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import pytest

from ..errors import RemoteError
from ..failures import WorkerFailedError
from ..group import WorkerGroup
from .workers import OddError, UnpicklableError, function_or_failure

__all__ = [
    "test_all_failing_ranks_are_reported_with_the_results_of_the_others",
    "test_builtin_exceptions_arrive_as_themselves",
    "test_cause_of_an_exception_is_shown",
    "test_errors_survive_pickling",
    "test_exception_that_cannot_travel_keeps_its_name_and_text",
    "test_exception_with_an_odd_constructor_arrives",
    "test_failure_of_one_rank_is_reported_while_another_hangs",
    "test_failure_says_place_rows_columns_and_user_frames",
    "test_failures_are_selected_by_their_own_type",
    "test_group_of_exceptions_of_a_worker_is_kept",
    "test_keyboard_interrupt_in_a_worker_is_told",
    "test_pending_call_reports_its_failure_at_get",
    "test_pickled_failure_leaves_out_results_that_cannot_be_pickled",
    "test_retry_needs_a_method_declared_idempotent",
    "test_retry_repeats_a_failed_call",
    "test_system_exit_in_a_worker_does_not_end_the_caller",
]


def test_all_failing_ranks_are_reported_with_the_results_of_the_others(group: WorkerGroup) -> None:
    with pytest.raises(WorkerFailedError, match=r"checker.fail_on failed on rank 1, 3 of 4") as caught:
        group.fail_on([5, 6, 7, 8], {1, 3})
    error = caught.value
    assert {rank: str(failure) for rank, failure in error.failures.items()} == {1: "no [6] here", 3: "no [8] here"}
    assert all(isinstance(failure, ValueError) for failure in error.exceptions)
    assert error.results == {0: [5], 2: [7]}
    assert error.unfinished == ()
    assert group.place()[1] == (1, 4)


def test_failure_says_place_rows_columns_and_user_frames(group: WorkerGroup) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        group.fail_on([5, 6, 7, 8, 9], {3})
    (context,) = caught.value.contexts
    assert (context.role, context.rank, context.method, context.rows) == ("checker", 3, "fail_on", 1)
    assert context.mesh == {"train": {"dp": 1}}
    assert context.columns["rows"] == "1 rows of list"
    (failure,) = caught.value.exceptions
    shown = _shown(failure)
    assert "rank 3 of checker, mesh train dp=1 in fail_on with 1 rows" in shown
    assert "conformance/workers.py" in shown
    assert "answering.py" not in shown


def test_failures_are_selected_by_their_own_type(group: WorkerGroup) -> None:
    caught: Any = None
    try:
        group.fail_on([1, 2, 3, 4], {0, 2})
    except* ValueError as errors:
        caught = errors
    assert isinstance(caught, WorkerFailedError)
    assert {rank: str(error) for rank, error in caught.failures.items()} == {0: "no [1] here", 2: "no [3] here"}


def test_errors_survive_pickling(group: WorkerGroup) -> None:
    for kind in ("odd", "unpicklable", "chain", "group"):
        with pytest.raises(WorkerFailedError) as caught:
            group.fail_with(kind)
        back = pickle.loads(pickle.dumps(caught.value))
        assert isinstance(back, WorkerFailedError)
        assert str(back) == str(caught.value)
        assert back.contexts == caught.value.contexts
        assert list(back.failures) == [1]


def test_pickled_failure_leaves_out_results_that_cannot_be_pickled(group: WorkerGroup) -> None:
    with pytest.raises(WorkerFailedError, match="no function of rank 1") as caught:
        group.execute_with_func_generator(function_or_failure)
    assert caught.value.results[0]() == 0
    back = pickle.loads(pickle.dumps(caught.value))
    assert (str(back), back.contexts) == (str(caught.value), caught.value.contexts)
    assert back.results == {2: 2, 3: 3}


@pytest.mark.parametrize(
    ("kind", "expected", "state"),
    [
        ("decode", UnicodeDecodeError, {"encoding": "utf-8", "object": b"a\xff", "start": 1, "end": 2}),
        ("syntax", SyntaxError, {"filename": "<unknown>", "lineno": 1, "text": "("}),
        ("stop", StopIteration, {"value": "the end"}),
    ],
)
def test_builtin_exceptions_arrive_as_themselves(
    group: WorkerGroup, kind: str, expected: type[Exception], state: dict[str, Any]
) -> None:
    caught: Any = None
    try:
        group.fail_with(kind)
    except* expected as errors:
        caught = errors
    assert isinstance(caught, WorkerFailedError)
    failure = caught.failures[1]
    assert type(failure) is expected
    assert {name: getattr(failure, name) for name in state} == state
    assert "conformance/workers.py" in _shown(failure)


def test_exception_with_an_odd_constructor_arrives(group: WorkerGroup) -> None:
    with pytest.raises(WorkerFailedError, match="OddError: 1-2") as caught:
        group.fail_with("odd")
    failure = caught.value.failures[1]
    assert isinstance(failure, OddError | RemoteError)
    assert "conformance/workers.py" in _shown(failure)


def test_exception_that_cannot_travel_keeps_its_name_and_text(group: WorkerGroup) -> None:
    with pytest.raises(WorkerFailedError, match="holds a lock") as caught:
        group.fail_with("unpicklable")
    failure = caught.value.failures[1]
    assert isinstance(failure, UnpicklableError | RemoteError)
    assert "UnpicklableError" in _shown(failure)
    assert "conformance/workers.py" in _shown(failure)


def test_cause_of_an_exception_is_shown(group: WorkerGroup) -> None:
    with pytest.raises(WorkerFailedError, match="from a key") as caught:
        group.fail_with("chain")
    assert "KeyError: 'missing'" in _shown(caught.value.failures[1])


def test_group_of_exceptions_of_a_worker_is_kept(group: WorkerGroup) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        group.fail_with("group")
    selected, rest = caught.value.split(KeyError)
    assert isinstance(selected, WorkerFailedError)
    assert [context.rank for context in selected.contexts] == [1]
    assert isinstance(rest, WorkerFailedError)
    assert "one of two" in _shown(rest)


def test_system_exit_in_a_worker_does_not_end_the_caller(group: WorkerGroup) -> None:
    with pytest.raises(WorkerFailedError, match="SystemExit: leaving") as caught:
        group.fail_with("exit")
    assert isinstance(caught.value.failures[1], RemoteError)
    assert group.place()[1] == (1, 4)


def test_keyboard_interrupt_in_a_worker_is_told(group: WorkerGroup, concurrent: bool) -> None:
    # Where the worker runs in the caller's own stack, the interrupt is the caller's.
    with pytest.raises(WorkerFailedError if concurrent else KeyboardInterrupt, match="by hand"):
        group.fail_with("interrupt")
    assert group.place()[1] == (1, 4)


def test_failure_of_one_rank_is_reported_while_another_hangs(fragile_group: WorkerGroup, concurrent: bool) -> None:
    if not concurrent:
        pytest.skip("ranks of this backend run one after the other")
    with pytest.raises(WorkerFailedError, match="rank 1 cannot sleep") as caught:
        fragile_group.nap_or_fail([600.0, -1.0])
    assert caught.value.unfinished == (0,)
    fragile_group.restart(0)
    assert fragile_group.place() == [(0, 2), (1, 2)]


def test_pending_call_reports_its_failure_at_get(group: WorkerGroup) -> None:
    pending = group.fail_on.options(blocking=False)([1, 2, 3, 4], {2})
    for _ in range(2):
        with pytest.raises(WorkerFailedError, match=r"no \[3\] here"):
            pending.get()


def test_retry_needs_a_method_declared_idempotent(group: WorkerGroup) -> None:
    with pytest.raises(ValueError, match="idempotent"):
        group.echo.options(retry=1)


def test_retry_repeats_a_failed_call(fragile_group: WorkerGroup) -> None:
    assert fragile_group.third_time_lucky.options(retry=2)() == [3, 3]


def _shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
