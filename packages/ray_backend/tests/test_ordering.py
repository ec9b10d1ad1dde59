import random

from hypothesis import given
from hypothesis import strategies as st

from kapell.ray_backend.ordering import Place, node_key, order_groups, order_places, seats


def test_ranks_are_grouped_by_node_and_sorted_by_device_whatever_order_bundles_come_in():
    table = {Place(0, 0): ("A", "1"), Place(0, 1): ("A", "0"), Place(1, 0): ("B", "1"), Place(1, 1): ("B", "0")}
    for seed in range(20):
        places = list(table)
        random.Random(seed).shuffle(places)
        order = order_places(places, [(table[p][0],) for p in places], [(table[p][1],) for p in places])
        assert [table[places[i]] for i in order] == [("A", "0"), ("A", "1"), ("B", "0"), ("B", "1")]


def test_devices_are_compared_as_numbers():
    places = [Place(0, bundle) for bundle in range(3)]
    assert order_places(places, [()] * 3, [("10",), ("9",), ("2",)]) == [2, 1, 0]


def test_without_devices_bundles_keep_their_order():
    places = [Place(0, 2), Place(0, 0), Place(0, 1)]
    assert order_places(places, [()] * 3, [()] * 3) == [1, 2, 0]


def test_addresses_are_compared_as_numbers():
    addresses = ["10.0.0.10", "10.0.0.9", "fd00::2", "9.255.0.1"]
    assert sorted(addresses, key=lambda address: node_key(address, "", "")) == [
        "9.255.0.1",
        "10.0.0.9",
        "10.0.0.10",
        "fd00::2",
    ]


def test_a_host_name_and_bracketed_addresses_are_accepted():
    assert node_key("[fd00::2]", "", "") == node_key("fd00::2", "", "")
    assert node_key("node-a", "", "") < node_key("node-b", "", "")


@given(st.permutations(range(6)))
def test_the_same_nodes_give_the_same_order_however_groups_were_created(permutation):
    sizes, nodes = [2] * 6, [(node,) for node in permutation]
    assert [nodes[group] for group in order_groups(sizes, nodes)] == [(node,) for node in range(6)]


def test_slots_keep_their_size_when_nodes_are_ordered():
    sizes = [4, 2, 4]
    order = order_groups(sizes, [("c",), ("a",), ("b",)])
    assert [sizes[group] for group in order] == sizes
    assert order == [2, 1, 0]


def test_seats_follow_uneven_nodes():
    assert [(s.local_rank, s.local_world_size, s.node_rank) for s in seats("aaaabb")] == [
        (0, 4, 0),
        (1, 4, 0),
        (2, 4, 0),
        (3, 4, 0),
        (0, 2, 1),
        (1, 2, 1),
    ]
    assert [s.local_rank for s in seats("abb")] == [0, 0, 1]
