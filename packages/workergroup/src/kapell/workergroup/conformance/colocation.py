# ruff: noqa: D103 - a test's name is its sentence
"""Several roles in one process: separate namespaces and meshes, within reach of each other; spawned, or fused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from ..colocation import colocate, colocated_worker_class
from ..failures import WorkerFailedError
from ..group import WorkerGroup
from ..pool import ClassWithInitArgs
from .workers import Changer, Critic, Hybrid, config_of

__all__ = [
    "test_arguments_of_a_constructor_are_private_to_each_worker",
    "test_class_with_roles_combines_them_and_is_fused",
    "test_errors_in_a_role_name_the_role",
    "test_fused_roles_are_attributes_of_the_group",
    "test_role_whose_name_begins_that_of_another_is_a_role_of_its_own",
    "test_roles_have_their_own_names_and_meshes_in_shared_processes",
    "test_roles_reach_each_other",
    "test_spawned_roles_are_groups",
    "test_unknown_role_is_refused",
]


def test_spawned_roles_are_groups(colocated_group: WorkerGroup) -> None:
    roles = colocated_group.spawn({"scorer", "critic"})
    assert roles["scorer"].score([1, 2, 3, 4]) == [1, 2, 4, 5]
    assert roles["critic"].judge([1, 2, 3]) == [3, 6, 9]
    assert roles["critic"].judge.options(blocking=False)([1]).get() == [3]

    async def inside_a_loop() -> list[int]:
        return roles["critic"].judge([1, 2])

    assert asyncio.run(inside_a_loop()) == [3, 6]
    assert roles["critic"][1].own_name() == ["critic"]


def test_fused_roles_are_attributes_of_the_group(colocated_group: WorkerGroup) -> None:
    colocated_group.fuse(["scorer", "critic"])
    assert colocated_group.critic.judge(colocated_group.scorer.score([1, 2])) == [3, 9]


def test_roles_have_their_own_names_and_meshes_in_shared_processes(colocated_group: WorkerGroup) -> None:
    roles = colocated_group.spawn(["scorer", "critic"])
    assert roles["scorer"].own_name() == ["scorer", "scorer"]
    assert roles["critic"].own_name() == ["critic", "critic"]
    assert roles["scorer"].process() == roles["critic"].process()
    assert roles["scorer"].in_mesh.plan([1, 2, 3]).rows == (2, 1)
    assert roles["critic"].in_mesh.plan([1, 2, 3]).rows == (1, 2)
    assert roles["critic"].in_mesh([1, 2, 3]) == [1, 2, 3]


def test_roles_reach_each_other(colocated_group: WorkerGroup) -> None:
    assert colocated_group.spawn(["critic"])["critic"].score_of_neighbour([1]) == [[1], [2]]


def test_errors_in_a_role_name_the_role(colocated_group: WorkerGroup) -> None:
    with pytest.raises(WorkerFailedError, match=r"scorer.fail failed on rank 0, 1 of 2"):
        colocated_group.spawn(["scorer"])["scorer"].fail()


def test_unknown_role_is_refused(colocated_group: WorkerGroup) -> None:
    with pytest.raises(KeyError, match="scorer"):
        colocated_group.spawn(["scroer"])


def test_role_whose_name_begins_that_of_another_is_a_role_of_its_own(make_group: Callable[..., WorkerGroup]) -> None:
    roles = {"actor": ClassWithInitArgs(Critic, scale=2), "actor_rollout": ClassWithInitArgs(Critic, scale=5)}
    groups = make_group(1, colocate(roles)).spawn(roles)
    assert groups["actor"].judge([1]) == [2]
    assert groups["actor_rollout"].judge([1]) == [5]


@pytest.mark.parametrize(
    "made_of",
    [
        lambda role: role,
        lambda role: colocate({"role": role}),
        lambda role: ClassWithInitArgs(colocated_worker_class({"role": role})),
    ],
    ids=["alone", "colocated", "in a class"],
)
def test_arguments_of_a_constructor_are_private_to_each_worker(
    make_group: Callable[..., WorkerGroup], made_of: Callable[[ClassWithInitArgs], ClassWithInitArgs]
) -> None:
    config = {"rows": 8, "ranks": []}
    group = make_group(2, made_of(ClassWithInitArgs(Changer, config)))
    seen = group.execute_with_func_generator(config_of)
    assert seen == [{"rows": 4, "ranks": [0]}, {"rows": 4, "ranks": [1]}]
    assert config == {"rows": 8, "ranks": []}


def test_class_with_roles_combines_them_and_is_fused(make_group: Callable[..., WorkerGroup]) -> None:
    group = make_group(2, ClassWithInitArgs(Hybrid))
    group.fuse(["scorer", "critic"])
    assert group.score_and_scale([1]) == [[3], [6]]
    assert group.scorer.score([1, 2]) == [1, 3]
