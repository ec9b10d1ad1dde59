"""Mesh dispatch: rows by data-parallel rank, one collector each, joined in data-parallel order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from list_batch import ids, run

from kapell.decorators import (
    Dispatch,
    GroupShape,
    MeshLayout,
    MethodSpec,
    collect_lazy_compute_data_proto,
    dispatch_lazy_compute_data_proto,
    make_plan,
)


def plan(layout, *args, **kwargs):
    shape = GroupShape(len(layout.dp_ranks), meshes={"actor": layout})
    return make_plan("f", MethodSpec(dispatch_mode=Dispatch.mesh("actor")), shape, args, kwargs)


def test_ranks_of_one_data_parallel_rank_get_the_same_rows():
    planned = plan(MeshLayout((0, 0, 1, 1), (True, False, True, False)), [10, 20])
    assert [planned.call_for(rank)[0][0] for rank in range(4)] == [[10], [10], [20], [20]]
    assert planned.collect_ranks == (0, 2)


def test_peers_are_collected_once():
    layout = MeshLayout((0, 0, 1, 1), (True, False, True, False))
    planned = plan(layout, ids(4))
    outputs = {0: planned.call_for(0)[0][0], 2: planned.call_for(2)[0][0]}
    assert planned.collect([outputs[rank] for rank in planned.collect_ranks]).column("id") == [0, 1, 2, 3]


def test_any_mapping_joins_in_data_parallel_order():
    planned = plan(MeshLayout((2, 0, 1, 0), (True, False, True, True)), list("abc"))
    assert planned.collect_ranks == (3, 2, 0)
    assert run(planned, lambda rows: rows) == ["a", "b", "c"]
    assert planned.rows_of(0) == range(2, 3)


@given(st.data())
def test_every_mapping_gives_the_rows_back_in_order(data):
    size = data.draw(st.integers(1, 5))
    dp_ranks = data.draw(st.permutations(list(range(size)) + data.draw(st.lists(st.integers(0, size - 1), max_size=6))))
    collect = [False] * len(dp_ranks)
    for dp_rank in range(size):
        collect[data.draw(st.sampled_from([rank for rank, dp in enumerate(dp_ranks) if dp == dp_rank]))] = True
    rows = list(range(data.draw(st.integers(0, 20))))
    assert run(plan(MeshLayout(tuple(dp_ranks), tuple(collect)), rows), lambda part: part) == rows


@pytest.mark.parametrize(
    ("dp_ranks", "collect", "message"),
    [
        ((0, 2), (True, True), r"no rank registered the data-parallel ranks \[1\] of 3"),
        ((0, 0), (True, True), r"data-parallel rank 0 has the collectors \[0, 1\]"),
        ((0, 1), (True, False), r"data-parallel rank 1 \(ranks \[1\]\) has no collector"),
        ((0, -1), (True, True), "rank 1 registered the negative data-parallel rank -1"),
        ((0, 1), (True,), "2 dp_ranks has 1 collect flags"),
        ((), (), "at least one rank"),
    ],
)
def test_broken_meshes_are_refused_before_anything_is_sent(dp_ranks, collect, message):
    with pytest.raises(ValueError, match=message):
        MeshLayout(dp_ranks, collect)


def test_a_mesh_must_fit_its_group():
    with pytest.raises(ValueError, match="mesh 'actor' maps 1 ranks; the group has 2"):
        GroupShape(2, meshes={"actor": MeshLayout((0,), (True,))})
    with pytest.raises(ValueError, match="at least one rank"):
        GroupShape(0)


def test_an_unknown_mesh_lists_the_known():
    shape = GroupShape(1, meshes={"actor": MeshLayout((0,), (True,))})
    with pytest.raises(ValueError, match=r"mesh 'acto' is not registered; did you mean 'actor'\? \(known: actor\)"):
        make_plan("f", MethodSpec(dispatch_mode=Dispatch.mesh("acto")), shape, ([1],))
    with pytest.raises(ValueError, match=r"known: none"):
        make_plan("f", MethodSpec(dispatch_mode=Dispatch.mesh("actor")), GroupShape(1), ([1],))


def test_a_layout_is_worked_out_once():
    layout = MeshLayout((1, 0), (True, True))
    assert layout.collect_ranks is layout.collect_ranks
    assert MeshLayout.flat(3) is MeshLayout.flat(3)


def test_a_collecting_rank_that_returns_none_is_named():
    planned = plan(MeshLayout((0, 0, 1, 1), (False, True, True, False)), ids(4))
    with pytest.raises(TypeError, match="ListBatch from rank 1; NoneType from rank 2"):
        planned.collect([planned.call_for(1)[0][0], None])


def test_the_functions_ask_the_group_for_its_mesh():
    shape = GroupShape(3, meshes={"m": MeshLayout((1, 0, 1), (True, True, False))})
    laid, _ = dispatch_lazy_compute_data_proto("m", shape, [5, 6])
    assert laid == ([[6], [5], [6]],)
    assert collect_lazy_compute_data_proto("m", shape, [[6], [5], None]) == [5, 6]
    assert shape._dispatch_info == {"m": [1, 0, 1]}
    assert shape._collect_info == {"m": [True, True, False]}
