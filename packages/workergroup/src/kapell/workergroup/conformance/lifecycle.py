# ruff: noqa: D103 - a test's name is its sentence
"""Groups start whole or not at all, see their own environment, lose and regain workers, and close for good."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..backend import Backend
from ..errors import GroupClosedError
from ..failures import WorkerFailedError, WorkerLostError
from ..group import WorkerGroup
from ..pool import ClassWithInitArgs
from .workers import Checker, Picky

__all__ = [
    "test_any_pool_can_ask_for_accelerators",
    "test_close_is_harmless_when_repeated_and_calls_say_so",
    "test_failing_constructor_is_reported_at_once_with_its_rank",
    "test_health_tells_unanswered_calls",
    "test_lost_worker_is_reported_and_restarts",
    "test_parts_of_a_pool_merged_again_hold_a_group",
    "test_retry_restarts_lost_workers",
    "test_variables_of_the_backend_cannot_be_overridden",
    "test_view_keeps_its_workers_alive",
    "test_watch_tells_of_a_lost_worker",
    "test_worker_lost_during_a_call_ends_the_pending_call",
    "test_workers_do_not_see_each_others_variables",
    "test_workers_see_their_own_place_in_their_environment",
]


def test_any_pool_can_ask_for_accelerators(backend: Backend) -> None:
    assert backend.resource_pool([2, 1], use_gpu=True).world_size == 3


def test_parts_of_a_pool_merged_again_hold_a_group(backend: Backend) -> None:
    whole = backend.resource_pool([2, 1])
    merged = whole.merge(*whole.split([1, 1, 1]))
    with backend.worker_group(merged, ClassWithInitArgs(Checker, base=1)) as group:
        assert group.place() == [(0, 3), (1, 3), (2, 3)]
    whole.close()


def test_workers_see_their_own_place_in_their_environment(group: WorkerGroup) -> None:
    assert group.variable("RANK") == ["0", "1", "2", "3"]
    assert group.variable("WORLD_SIZE") == ["4"] * 4
    assert group.variable("COLOR") == ["blue"] * 4
    assert len(set(group.variable("MASTER_PORT"))) == 1
    assert len(set(group.variable("MASTER_ADDR"))) == 1


def test_workers_do_not_see_each_others_variables(group: WorkerGroup) -> None:
    group[1].set_variable("MOOD", "good")
    assert group.variable("MOOD") == [None, "good", None, None]


def test_variables_of_the_backend_cannot_be_overridden(backend: Backend, pool: Any) -> None:
    with pytest.raises(ValueError, match="WORLD_SIZE"):
        backend.worker_group(pool, ClassWithInitArgs(Checker, base=1), worker_env={"WORLD_SIZE": "100"})


def test_failing_constructor_is_reported_at_once_with_its_rank(
    make_group: Callable[..., WorkerGroup], concurrent: bool
) -> None:
    with pytest.raises(WorkerFailedError, match=r"__init__.*rank 1.*bad cfg") as caught:
        make_group(2, ClassWithInitArgs(Picky, seconds=600.0 if concurrent else 0.0), role="picky")
    assert isinstance(caught.value.failures[1], ValueError)


def test_lost_worker_is_reported_and_restarts(
    fragile_group: WorkerGroup, lose_worker: Callable[[WorkerGroup, int], None]
) -> None:
    fragile_group.set_value(5)
    lose_worker(fragile_group, 1)
    with pytest.raises(WorkerLostError, match="lost rank 1 of 2") as caught:
        fragile_group.get_value.options(timeout=240)()
    assert caught.value.results == {0: 5}
    assert fragile_group.is_alive() == [True, False]
    fragile_group.restart(1)
    assert fragile_group.is_alive() == [True, True]
    assert fragile_group.get_value() == [5, 0]
    assert fragile_group.add([0, 0]) == [10, 10]  # with its constructor's arguments


def test_worker_lost_during_a_call_ends_the_pending_call(
    fragile_group: WorkerGroup, lose_worker: Callable[[WorkerGroup, int], None], concurrent: bool
) -> None:
    if not concurrent:
        pytest.skip("a call of this backend is over before a worker can be lost in it")
    pending = fragile_group.nap.options(blocking=False)([600.0, 0.0])
    lose_worker(fragile_group, 0)
    with pytest.raises(WorkerLostError, match="lost rank 0 of 2") as caught:
        pending.get(timeout=240)
    assert caught.value.results == {1: 1}


def test_retry_restarts_lost_workers(
    fragile_group: WorkerGroup, lose_worker: Callable[[WorkerGroup, int], None]
) -> None:
    lose_worker(fragile_group, 0)
    assert len(fragile_group.alive_since_start.options(retry=1)()) == 2


def test_watch_tells_of_a_lost_worker(
    fragile_group: WorkerGroup, lose_worker: Callable[[WorkerGroup, int], None]
) -> None:
    told = threading.Event()
    lost: list[int] = []

    def on_lost(rank: int) -> None:
        lost.append(rank)
        told.set()

    with fragile_group.watch(on_lost, interval=0.1):
        lose_worker(fragile_group, 1)
        assert told.wait(240.0)
    assert lost == [1]


def test_health_tells_unanswered_calls(group: WorkerGroup, concurrent: bool, tmp_path: Path) -> None:
    release = tmp_path / "release"
    if not concurrent:
        release.touch()
    pending = group.wait_for.options(blocking=False)([str(release), "", "", ""])
    health = group.health()
    release.touch()
    assert [state.alive for state in health] == [True] * 4
    assert not concurrent or health[0].unanswered == ("checker.wait_for",)
    pending.get()
    assert all(not state.unanswered for state in group.health())


def test_view_keeps_its_workers_alive(make_group: Callable[..., WorkerGroup]) -> None:
    view = make_group(2, ClassWithInitArgs(Checker, base=1))[1:]
    gc.collect()
    assert view.place() == [(1, 2)]


def test_close_is_harmless_when_repeated_and_calls_say_so(make_group: Callable[..., WorkerGroup]) -> None:
    with make_group(2, ClassWithInitArgs(Checker, base=1), role="short") as group:
        view = group[0]
        assert group.place() == [(0, 2), (1, 2)]
    group.close()
    assert group.closed
    assert group.is_alive() == [False, False]
    for closed in (group, view):
        with pytest.raises(GroupClosedError, match="short"):
            closed.place()
        with pytest.raises(GroupClosedError, match="short"):
            closed.restart(0)
