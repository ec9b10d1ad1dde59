# ruff: noqa: D103 - a test's name is its sentence
"""Parts of a group are groups too: slices, ranks at coordinates of a mesh, a free worker; and the static type."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..errors import NotRegisteredError
from ..failures import WorkerFailedError
from ..group import WorkerGroup
from .workers import Checker, Scorer

__all__ = [
    "test_chosen_worker_is_a_free_one",
    "test_error_in_a_slice_names_the_rank_in_the_whole_group",
    "test_group_as_its_worker_class",
    "test_mesh_rows_through_a_slice_of_the_mesh",
    "test_method_without_a_label_is_named_in_the_error",
    "test_slice_of_a_group_is_called_alone",
    "test_where_finds_the_ranks_at_mesh_coordinates",
]


def test_slice_of_a_group_is_called_alone(group: WorkerGroup) -> None:
    assert group[1:3].labelled_rows([5, 6, 7]) == [(1, 5), (1, 6), (2, 7)]
    assert group[3].place() == [(3, 4)]
    assert [rank for rank, _ in group[[2, 0]].place()] == [2, 0]
    assert len(group[1:]) == 3
    with pytest.raises(IndexError):
        group[4:]


def test_where_finds_the_ranks_at_mesh_coordinates(group: WorkerGroup) -> None:
    assert [rank for rank, _ in group.where(dp=1).place()] == [2, 3]
    assert [rank for rank, _ in group.where("train", dp=0).place()] == [0, 1]
    with pytest.raises(IndexError, match="dp"):
        group.where(dp=2)


def test_mesh_rows_through_a_slice_of_the_mesh(group: WorkerGroup) -> None:
    assert group.where(dp=1).mesh_rows([1, 2]) == [(2, 1), (2, 2)]


def test_chosen_worker_is_a_free_one(group: WorkerGroup, concurrent: bool, tmp_path: Path) -> None:
    release = tmp_path / "release"
    if not concurrent:
        release.touch()
    busy = group[:3].wait_for.options(blocking=False)([str(release)] * 3)
    chosen = group.choose()
    release.touch()
    assert len(chosen) == 1
    assert not concurrent or chosen.place() == [(3, 4)]
    busy.get()
    assert {group.choose().place()[0] for _ in range(4)} == {(0, 4), (1, 4), (2, 4), (3, 4)}


def test_error_in_a_slice_names_the_rank_in_the_whole_group(group: WorkerGroup) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        group[2:].fail_on([1, 2], {3})
    assert list(caught.value.failures) == [3]
    assert caught.value.results == {2: [1]}


def test_group_as_its_worker_class(group: WorkerGroup) -> None:
    assert group.as_(Checker).place() == [(0, 4), (1, 4), (2, 4), (3, 4)]
    with pytest.raises(TypeError, match="Scorer"):
        group.as_(Scorer)


def test_method_without_a_label_is_named_in_the_error(group: WorkerGroup) -> None:
    with pytest.raises(NotRegisteredError, match="`unlabelled` exists on Checker but is not @register-ed"):
        _ = group.unlabelled
    with pytest.raises(AttributeError, match="no method `plcae`"):
        _ = group.plcae
