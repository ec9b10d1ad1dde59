import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kapell.ray_backend.preflight import InfeasiblePoolError, NodeResources, PoolRequest, check_placeable


def nodes(*gpus, cpus=8.0):
    return [NodeResources(f"10.0.0.{i}", {"CPU": cpus, "GPU": float(gpu)}) for i, gpu in enumerate(gpus)]


GPU = {"CPU": 1.0, "GPU": 1.0}


def test_a_pool_that_fits_passes():
    check_placeable(PoolRequest((4, 4), GPU), nodes(4, 4))
    check_placeable(PoolRequest((4, 2), GPU), nodes(2, 4))
    check_placeable(PoolRequest((2, 2), GPU), nodes(4))


def test_enough_in_total_but_not_on_one_node_fails():
    with pytest.raises(InfeasiblePoolError, match="no node can hold 8 processes together"):
        check_placeable(PoolRequest((8,), GPU), nodes(4, 4))


def test_the_same_processes_fit_when_they_may_spread():
    check_placeable(PoolRequest((8,), GPU, "PACK"), nodes(4, 4))


def test_a_missing_accelerator_says_how_many_there_are_and_the_way_out():
    with pytest.raises(InfeasiblePoolError, match=r"need 2 GPU but the cluster has 0; .*use_gpu=False"):
        check_placeable(PoolRequest((2,), GPU), nodes(0))


def test_cpus_count_too():
    with pytest.raises(InfeasiblePoolError, match="3 processes need 3 CPU but the cluster has 2"):
        check_placeable(PoolRequest((3,), {"CPU": 1.0}), nodes(0, cpus=2.0))


def test_the_message_shows_what_is_asked_and_what_there_is():
    with pytest.raises(InfeasiblePoolError) as caught:
        check_placeable(PoolRequest((4, 2), GPU), nodes(4, 1))
    text = str(caught.value)
    assert "asked:" in text
    assert "node 0: 4 processes" in text
    assert "cluster:" in text
    assert "10.0.0.1" in text
    assert "total" in text


def test_a_big_cluster_is_summed_up_in_the_message():
    with pytest.raises(InfeasiblePoolError, match=r"\.\.\. and 80 more"):
        check_placeable(PoolRequest((8,), GPU), nodes(*[4] * 100))


def test_the_error_survives_pickling():
    error = InfeasiblePoolError("reason", PoolRequest((1,), GPU), nodes(1))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_shares_of_a_third_fit_despite_rounding():
    check_placeable(PoolRequest((1, 1, 1), {"CPU": 0.3333}), [NodeResources("a", {"CPU": 1.0})])


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_a_cluster_of_exactly_the_asked_nodes_always_fits(counts):
    check_placeable(PoolRequest(tuple(counts), GPU), nodes(*counts))
