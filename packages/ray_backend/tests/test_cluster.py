"""Several nodes on one machine: placement, uneven nodes, pools across nodes, transfers, the loss of a node."""

import os
import time

import numpy as np
import pytest
import ray
import torch

from kapell.decorators import Dispatch, register
from kapell.protocol import DataProto
from kapell.ray_backend import RayResourcePool, RayWorkerGroup, merge_resource_pool, placement, split_resource_pool
from kapell.workergroup import ClassWithInitArgs, ResourcePool, Worker, WorkerLostError


class Sitter(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def seat(self):
        node = ray.get_runtime_context().get_node_id()
        return node, self.rank, self.local_rank, self.local_world_size, int(os.environ["NODE_RANK"])

    @register(Dispatch.DP_COMPUTE_PROTO)
    def double(self, array):
        array *= 2
        return array

    @register(Dispatch.ONE_TO_ALL)
    def weigh(self, array):
        return array.nbytes

    @register(Dispatch.ONE_TO_ALL)
    def stay_on_node(self, node_rank):
        if os.environ["NODE_RANK"] == str(node_rank):
            time.sleep(600)
        return self.rank


@pytest.fixture(scope="module")
def nodes(backend, cluster, wait_until):
    """Two nodes with 4 and 2 boards; nothing else has boards."""
    added = [cluster.add_node(num_cpus=4, resources={"BOARD": count}) for count in (4, 2)]
    cluster.wait_for_nodes(timeout=240)
    yield added
    for node in added:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)
    # A program that joins the cluster takes any node of this host that it believes alive.
    assert wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 1)


@pytest.fixture
def make_pool(nodes):
    pools = []

    def make(counts, **settings):
        settings = {"accelerator": "BOARD", "cpus_per_process": 0.5, "timeout": 240, **settings}
        pools.append(RayResourcePool(counts, **settings))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.mark.parametrize(
    ("counts", "local_ranks", "local_sizes", "node_ranks"),
    [
        ([4, 2], [0, 1, 2, 3, 0, 1], [4, 4, 4, 4, 2, 2], [0, 0, 0, 0, 1, 1]),
        ([2, 4], [0, 1, 0, 1, 2, 3], [2, 2, 4, 4, 4, 4], [0, 0, 1, 1, 1, 1]),
        ([1, 2], [0, 0, 1], [1, 2, 2], [0, 1, 1]),
    ],
)
def test_ranks_follow_uneven_nodes(make_pool, counts, local_ranks, local_sizes, node_ranks):
    # Of a node's 4 CPUs two processes take 3, so that Ray cannot put two small entries on one node.
    pool = make_pool(counts, cpus_per_process=1.5 if sum(counts) <= 3 else 0.5)
    with RayWorkerGroup(pool, ClassWithInitArgs(Sitter)) as group:
        seats = group.seat()
    assert [seat[1] for seat in seats] == list(range(sum(counts)))
    assert [seat[2] for seat in seats] == local_ranks
    assert [seat[3] for seat in seats] == local_sizes
    assert [seat[4] for seat in seats] == node_ranks
    by_entry = {}
    for node, *_, entry in seats:
        by_entry.setdefault(entry, set()).add(node)
    assert all(len(on) == 1 for on in by_entry.values())


def test_processes_of_one_entry_may_spread_over_nodes_when_they_need_not_be_packed(make_pool):
    with RayWorkerGroup(make_pool([5]), ClassWithInitArgs(Sitter), bin_pack=False) as group:
        seats = group.seat()
    nodes = [seat[0] for seat in seats]
    assert len(set(nodes)) == 2
    assert nodes == sorted(nodes, key=nodes.index)  # ranks of a node are neighbours
    for node in set(nodes):
        own = [seat for seat in seats if seat[0] == node]
        assert [seat[2:4] for seat in own] == [(local, len(own)) for local in range(len(own))]


def test_equal_nodes_come_in_the_same_order_each_time(make_pool):
    orders = []
    for _ in range(2):
        # Each entry takes all CPUs of a node: Ray may otherwise put both on the larger node, now and then.
        pool = make_pool([2, 2], cpus_per_process=2)
        with RayWorkerGroup(pool, ClassWithInitArgs(Sitter)) as group:
            orders.append([seat[0] for seat in group.seat()])
        pool.close()
    assert len(set(orders[0])) == 2
    assert orders[0] == orders[1]


def test_a_pool_is_cut_across_nodes_cut_again_and_merged(make_pool):
    whole = make_pool([4, 2])
    first, second = split_resource_pool(whole, [3, 3])
    assert (first.store, second.store) == ([3], [1, 2])
    with RayWorkerGroup(second, ClassWithInitArgs(Sitter)) as group:
        assert [seat[1:4] for seat in group.seat()] == [(0, 0, 1), (1, 0, 2), (2, 1, 2)]
    one, two = split_resource_pool(second, [1, 2])
    assert (one.store, two.store) == ([1], [2])
    again = merge_resource_pool(first, one)
    assert again.store == [4]
    with RayWorkerGroup(again, ClassWithInitArgs(Sitter)) as group:
        assert [seat[2:4] for seat in group.seat()] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    with pytest.raises(ValueError, match="overlap"):
        merge_resource_pool(first, whole)
    assert whole.merge(*whole.split([1, 3, 2])).store == [4, 2]
    assert ResourcePool.merge(second, first).store == [4, 2]
    with pytest.raises(TypeError, match="different backends"):
        whole.merge(first, ResourcePool([1]))


def test_data_travels_between_nodes_and_stays_private(make_pool):
    with RayWorkerGroup(make_pool([4, 2]), ClassWithInitArgs(Sitter)) as group:
        sent = np.arange(600_000, dtype=np.float64)
        np.testing.assert_array_equal(group.double(sent), np.arange(600_000) * 2.0)
        np.testing.assert_array_equal(sent, np.arange(600_000))


def test_a_result_that_is_passed_on_never_comes_to_the_controllers_node(make_pool):
    with (
        RayWorkerGroup(make_pool([2, 1]), ClassWithInitArgs(Sitter)) as makers,
        RayWorkerGroup(make_pool([1]), ClassWithInitArgs(Sitter)) as readers,
    ):
        sent = np.ones(600_000)
        pending = makers.double.options(blocking=False)(sent)
        while not pending.done():
            time.sleep(0.01)
        assert readers.weigh(pending) == [sent.nbytes]
        refs = list(getattr(pending, "futures", pending))
        places = ray.experimental.get_object_locations(refs)
        here = ray.get_runtime_context().get_node_id()
        assert all(place["node_ids"] and here not in place["node_ids"] for place in places.values())
        assert makers.stats()["double"].fetched == 0
        assert readers.stats()["weigh"].sent == 0
        np.testing.assert_array_equal(pending.get(timeout=240), sent * 2)
        assert makers.stats()["double"].fetched == sent.nbytes


class Filler(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO, reads=("id",), writes=("wide",))
    def fill(self, batch):
        return DataProto.from_dict({"wide": batch.column("id").float()[:, None].expand(-1, 300_000).contiguous()})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("wide",), writes=("mean",))
    def average(self, batch):
        return DataProto.from_dict({"mean": batch.column("wide").mean(-1)})


def test_columns_by_reference_go_from_node_to_node_and_not_to_the_controllers(make_pool):
    with (
        RayWorkerGroup(make_pool([2, 1]), ClassWithInitArgs(Filler)) as makers,
        RayWorkerGroup(make_pool([1]), ClassWithInitArgs(Filler)) as readers,
    ):
        made = makers.by_reference().fill(DataProto.from_dict({"id": torch.arange(6)}))
        assert readers.average(made[[5, 0, 3]]).column("mean").tolist() == [5, 0, 3]
        places = ray.experimental.get_object_locations([kept.ref for kept in made.futures])
        here = ray.get_runtime_context().get_node_id()
        assert len(places) == 3
        assert all(place["node_ids"] and here not in place["node_ids"] for place in places.values())


def test_enough_boards_in_total_but_not_on_one_node_fails_at_once(make_pool):
    with pytest.raises(ValueError, match=r"(?s)no node can hold 5 processes together.*asked:.*cluster:"):
        make_pool([5]).get_placement_groups()


def test_a_busy_cluster_is_waited_for_with_a_limit_and_nothing_stays_reserved(make_pool, monkeypatch, caplog):
    monkeypatch.setattr(placement, "_REPORT_EVERY", 0.5)
    taken = make_pool([4])
    taken.get_placement_groups()
    waiting = make_pool([4, 2], timeout=3)
    with pytest.raises(TimeoutError, match=r"(?s)0 of 2 nodes are reserved.*free: .*asked:"):
        waiting.get_placement_groups()
    assert "for a pool on 2 nodes: 0 reserved; free in the cluster:" in caplog.text
    taken.close()
    make_pool([4, 2]).get_placement_groups()


def test_a_lost_node_is_reported_with_the_results_of_the_others(make_pool, nodes, cluster):
    # One rank is on the node that goes: of two, the second's end may become known too late to be told of.
    with RayWorkerGroup(make_pool([4, 1]), ClassWithInitArgs(Sitter), role="spread") as group:
        pending = group.stay_on_node.options(blocking=False)(1)
        ray.wait(list(pending)[:4], num_returns=4)  # a lost rank is reported a second later, whatever the others do
        cluster.remove_node(nodes[1], allow_graceful=False)
        with pytest.raises(WorkerLostError, match=r"spread.* lost rank 4 of 5") as caught:
            pending.get(timeout=240)
    assert caught.value.results == {0: 0, 1: 1, 2: 2, 3: 3}
    assert "pid" in caught.value.failures[4].node
