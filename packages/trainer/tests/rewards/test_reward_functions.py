"""What reward functions may return, raise and take in time (and what then happens to the step)."""

import asyncio
import logging
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
import torch

from kapell.trainer import reward_functions
from kapell.trainer.code_reward import CodeReward
from kapell.trainer.reward import RewardError, RewardTimeoutError
from kapell.trainer.reward_functions import FunctionReward, RewardRows, RowScore, ThreadedReward, read_score
from kapell.trainer.reward_sum import RewardSum, RewardTerm


def rows_of(*solutions, source="task"):
    return RewardRows(
        data_sources=[source] * len(solutions),
        solutions=list(solutions),
        ground_truths=["truth"] * len(solutions),
        extra_infos=[{}] * len(solutions),
    )


def total(function, rows, *, fallback=None, **options):
    return RewardSum([RewardTerm("task", FunctionReward(function=function, **options))], fallback)(rows)


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        (0.5, 0.5),
        (0.0, 0.0),
        (0, 0.0),
        (False, 0.0),
        (True, 1.0),
        (np.float32(0.0), 0.0),
        (np.int64(2), 2.0),
        (np.array(0.25), 0.25),
        (torch.tensor(0.0), 0.0),
        ({"score": 0.0, "reward": 1.0}, 0.0),
        ({"score": 0}, 0.0),
        ({"score": np.float64(0.0), "acc": True}, 0.0),
    ],
)
def test_every_kind_of_number_is_a_score_and_zero_is_kept(returned, score):
    result = read_score(returned, "row 0")
    assert result.score == score
    assert type(result.score) is float


def test_scalars_of_numpy_and_torch_beside_the_score_are_numbers_too():
    extra = read_score(
        {"score": 1, "acc": np.bool_(True), "length": np.int64(3), "loss": torch.tensor(0.5)}, "row 0"
    ).extra
    assert extra == {"acc": True, "length": 3, "loss": 0.5}
    assert [type(value) for value in extra.values()] == [bool, int, float]


def test_a_function_that_calls_exit_has_failed_for_its_row():
    def ends(data_source, solution, truth, extra):
        sys.exit(3)

    async def ends_later(data_source, solution, truth, extra):
        sys.exit(3)

    for function in (ends, ends_later):
        with pytest.raises(RewardError, match=r"row 0 .*SystemExit: 3"):
            total(function, rows_of("a"), timeout=30)
        assert total(function, rows_of("a", "b"), fallback=-1.0, timeout=30).scores == [-1.0, -1.0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("1.0", "'1.0' of type str"),
        (None, "None of type NoneType"),
        ([1.0], "of type list"),
        (np.array([1.0, 2.0]), "of type ndarray"),
        (torch.tensor([0.5]), "of type Tensor"),
        (float("nan"), "returned nan"),
        (float("-inf"), "returned -inf"),
        ({"reward": 1.0}, "no 'score' for row 7, only: reward"),
        ({"score": None}, "None of type NoneType"),
    ],
)
def test_what_is_no_finite_number_is_an_error(returned, message):
    with pytest.raises(RewardError, match=message):
        read_score(returned, "row 7")


def test_an_exception_names_row_and_data_source_and_keeps_its_cause():
    def function(data_source, solution, truth, extra):
        return 1 / int(solution)

    with pytest.raises(RewardError, match=r"row 1 \(data_source 'division', response '0'.*ZeroDivisionError") as caught:
        total(function, rows_of("1", "0", "2", source="division"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_nothing_runs_after_the_row_that_raises():
    seen = []

    def function(data_source, solution, truth, extra):
        seen.append(solution)
        raise ValueError

    with pytest.raises(RewardError):
        total(function, rows_of("a", "b", "c"))
    assert seen == ["a"]


def test_a_fallback_is_counted_and_warned_of_once_a_batch(caplog):
    def function(data_source, solution, truth, extra):
        if solution == "bad":
            raise KeyError("missing")
        return {"score": 1.0, "length": len(solution)}

    with caplog.at_level(logging.WARNING):
        scores = total(function, rows_of("ok", "bad", "fine", "bad"), fallback=-1.0)
    assert scores.scores == [1.0, -1.0, 1.0, -1.0]
    assert scores.errors == {"task": 2}
    assert scores.extra == {"length": [2, None, 4, None]}
    (record,) = caplog.records
    assert "failed for 2 of 4 rows, which count as -1; the first: the reward failed for row 1" in record.getMessage()


def test_a_fallback_of_zero_is_a_fallback():
    def function(data_source, solution, truth, extra):
        raise ValueError

    assert total(function, rows_of("a"), fallback=0.0).scores == [0.0]


def test_an_endless_loop_ends_at_the_limit():
    def function(data_source, solution, truth, extra):
        while solution == "hang":
            with suppress(Exception):
                pass
        return 1.0

    started = time.monotonic()
    scores = total(function, rows_of("a", "hang", "b"), timeout=0.2, fallback=0.0)
    assert scores.scores == [1.0, 0.0, 1.0]
    assert time.monotonic() - started < 60
    with pytest.raises(RewardTimeoutError, match=r"more than 0\.2 s for row 1"):
        total(function, rows_of("a", "hang"), timeout=0.2)


def test_a_function_that_takes_the_alarm_for_itself_neither_escapes_the_limit_nor_changes_the_callers():
    def mine(number, frame):
        raise AssertionError("the caller's alarm rang")

    def function(data_source, solution, truth, extra):
        if solution == "hang":
            time.sleep(60)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        return 1.0

    previous = signal.signal(signal.SIGALRM, mine)
    signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        with pytest.raises(RewardTimeoutError, match="row 1"):
            total(function, rows_of("a", "hang"), timeout=0.2)
        assert signal.getsignal(signal.SIGALRM) is mine
        assert 900 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_a_pattern_that_backtracks_forever_ends_at_the_limit():
    pattern = re.compile(r"(a+)+$")
    with pytest.raises(RewardTimeoutError, match="row 0"):
        total(lambda *_: bool(pattern.match("a" * 40 + "b")), rows_of("x"), timeout=0.2)


def test_outside_the_main_thread_the_limit_holds_too():
    stop = threading.Event()

    def function(data_source, solution, truth, extra):
        if solution == "hang":
            stop.wait(60)
        if solution == "late":
            raise TimeoutError("of a connection")
        return 1.0

    reward = FunctionReward(function=function, timeout=0.2)
    with ThreadPoolExecutor(1) as pool:
        outcomes = pool.submit(lambda: list(reward(rows_of("a", "hang", "late", "b")))).result(60)
    stop.set()
    assert outcomes[0] == outcomes[3] == RowScore(1.0)
    assert isinstance(outcomes[1], RewardTimeoutError)
    assert "TimeoutError: of a connection" in str(outcomes[2])
    assert not isinstance(outcomes[2], RewardTimeoutError)


def test_the_clock_stands_still_between_rows():
    reward = FunctionReward(function=lambda *_: 1.0, timeout=0.2)
    outcomes = reward(rows_of("a", "b"))
    assert next(outcomes) == RowScore(1.0)
    time.sleep(0.4)
    assert next(outcomes) == RowScore(1.0)


def test_long_responses_are_cut_in_messages():
    with pytest.raises(RewardError) as caught:
        total(lambda *_: "x", rows_of("y" * 100_000))
    assert len(str(caught.value)) < 1000


def test_no_rows_are_no_scores():
    scores = total(lambda *_: 1 / 0, rows_of())
    assert scores.scores == []
    assert scores.components == {"task": []}


async def score_later(data_source, solution, truth, extra):
    await asyncio.sleep(0.01)
    return {"score": float(len(solution)), "thread": threading.current_thread().name}


def test_async_functions_run_on_a_loop_of_their_own_in_order():
    scores = total(score_later, rows_of("a", "bbb", "cc"), timeout=30)
    assert scores.scores == [1.0, 3.0, 2.0]
    assert set(scores.extra["thread"]) == {"kapell-rewards"}


def test_async_functions_work_inside_a_running_loop():
    async def main():
        return total(score_later, rows_of("a"), timeout=30).scores

    assert asyncio.run(main()) == [1.0]


def test_an_async_callable_object_is_recognised():
    class Judge:
        async def __call__(self, data_source, solution, truth, extra):
            return 2

    assert total(Judge(), rows_of("a")).scores == [2.0]


def test_concurrency_is_bounded():
    running, most = 0, 0

    async def function(data_source, solution, truth, extra):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return 0

    total(function, rows_of(*"abcdefgh"), concurrency=3)
    assert most == 3


def test_async_rows_have_their_own_limits_and_errors():
    async def function(data_source, solution, truth, extra):
        if solution == "hang":
            await asyncio.sleep(60)
        if solution == "fail":
            raise ValueError("no")
        return 1

    rows = rows_of("a", "hang", "fail", "b")
    outcomes = list(FunctionReward(function=function, timeout=0.2)(rows))
    assert outcomes[0] == outcomes[3] == RowScore(1.0)
    assert isinstance(outcomes[1], RewardTimeoutError)
    assert "row 2" in str(outcomes[2])
    with pytest.raises(RewardTimeoutError, match="row 1"):
        total(function, rows, timeout=0.2)


@pytest.mark.parametrize("timeout", [None, 30])
def test_a_time_out_or_a_cancelled_task_within_an_async_function_is_a_failure_of_its_row(timeout):
    async def function(data_source, solution, truth, extra):
        if solution == "late":
            raise TimeoutError("of a connection")
        if solution == "cancelled":
            task = asyncio.create_task(asyncio.sleep(60))
            task.cancel()
            await task
        return 1

    rows = rows_of("a", "late", "cancelled", "b")
    outcomes = list(FunctionReward(function=function, timeout=timeout)(rows))
    assert outcomes[0] == outcomes[3] == RowScore(1.0)
    assert "failed for row 1" in str(outcomes[1])
    assert "TimeoutError: of a connection" in str(outcomes[1])
    assert "CancelledError" in str(outcomes[2])
    assert not any(isinstance(outcome, RewardTimeoutError) for outcome in outcomes)
    assert total(function, rows, timeout=timeout, fallback=0.0).scores == [1.0, 0.0, 0.0, 1.0]


def test_an_async_function_that_turns_the_end_of_its_time_into_another_error_was_late():
    async def function(data_source, solution, truth, extra):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ConnectionError("closed") from None

    with pytest.raises(RewardTimeoutError, match=r"more than 0\.2 s for row 0"):
        total(function, rows_of("a"), timeout=0.2)


def test_an_async_function_that_blocks_is_found_out_and_the_next_batch_works(monkeypatch):
    monkeypatch.setattr(reward_functions, "_LOOP_GRACE_SECONDS", 0.2)
    stop = threading.Event()

    async def blocks(data_source, solution, truth, extra):
        stop.wait(60)
        return 1

    try:
        with pytest.raises(RewardTimeoutError, match=r"row 0 .*blocks its event loop"):
            total(blocks, rows_of("a", "b"), timeout=0.1)
        monkeypatch.setattr(reward_functions, "_LOOP_GRACE_SECONDS", 30)
        assert total(score_later, rows_of("a"), timeout=30).scores == [1.0]
    finally:
        stop.set()


def test_functions_that_bound_their_own_time_run_in_threads():
    barrier = threading.Barrier(2)

    def function(data_source, solution, truth, extra):
        barrier.wait(30)
        return float(solution)

    assert list(ThreadedReward(function=function, concurrency=2)(rows_of("1", "2"))) == [RowScore(1.0), RowScore(2.0)]


def test_tests_that_cannot_be_read_name_the_row():
    rows = rows_of("def f(): pass", source="code")
    with pytest.raises(RewardError, match=r"row 0 \(data_source 'code'.*not JSON"):
        RewardSum([RewardTerm("tests", ThreadedReward(function=CodeReward()))])(rows)
