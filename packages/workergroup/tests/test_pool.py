from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kapell.workergroup import ResourcePool

nodes = st.lists(st.integers(1, 8), min_size=1, max_size=6)


def test_nodes_may_differ_in_size():
    pool = ResourcePool([4, 2])
    assert pool.world_size == 6
    assert pool.local_world_size_list() == [4, 4, 4, 4, 2, 2]
    assert pool.local_rank_list() == [0, 1, 2, 3, 0, 1]
    assert pool.node_rank_list == [0, 0, 0, 0, 1, 1]


def test_split_by_sizes_may_cross_nodes():
    assert [part.process_on_nodes for part in ResourcePool([4, 2]).split([3, 3])] == [[3], [1, 2]]
    assert [part.process_on_nodes for part in ResourcePool([4, 2]).split(2)] == [[2], [2], [2]]


@pytest.mark.parametrize("counts", [[], [0], [2, -1], [1.5], [True], ["2"]])
def test_impossible_nodes_are_refused(counts):
    with pytest.raises(ValueError, match="process_on_nodes"):
        ResourcePool(counts)


@pytest.mark.parametrize("size", [0, -1, 4, [6, 1], [5], [7, -1], []])
def test_impossible_splits_are_refused_with_both_numbers(size):
    with pytest.raises(ValueError, match="6 processes"):
        ResourcePool([4, 2]).split(size)


def test_merging_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        ResourcePool.merge()


@given(nodes, st.data())
def test_split_then_merge_keeps_every_process(counts, data):
    pool = ResourcePool(counts)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, pool.world_size - 1)), max_size=4)) | {0, pool.world_size})
    sizes = [stop - start for start, stop in pairwise(cuts)]
    parts = pool.split(sizes)
    assert [part.world_size for part in parts] == sizes
    assert ResourcePool.merge(*parts).world_size == pool.world_size


@given(nodes)
def test_every_rank_has_a_place_on_its_node(counts):
    pool = ResourcePool(counts)
    places = zip(pool.local_rank_list(), pool.local_world_size_list(), strict=True)
    assert all(local < size for local, size in places)
    assert pool.node_rank_list == sorted(pool.node_rank_list)
