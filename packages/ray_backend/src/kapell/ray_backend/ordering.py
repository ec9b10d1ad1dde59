"""Which rank lies where: contiguous on a node, ordered by node and device, the same after every restart. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

__all__ = ["NodeSeat", "Place", "node_key", "order_groups", "order_places", "seats"]


@dataclass(frozen=True, order=True)
class Place:
    """One bundle: where a worker process goes."""

    group: int
    """Position of its placement group (one a node) in the pool."""
    bundle: int
    """Index of the bundle in the placement group."""


def node_key(address: str, name: str, node_id: str) -> tuple[int, int, str, str, str]:
    """A sort key for nodes that reads addresses as numbers, so that 10.0.0.9 comes before 10.0.0.10.

    ``name`` and ``node_id`` break ties among several nodes of one address.
    """
    try:
        parsed = ipaddress.ip_address(address.strip("[]"))
    except ValueError:
        return 9, 0, address, name, node_id
    return parsed.version, int(parsed), "", name, node_id


def order_groups(sizes: Sequence[int], nodes: Sequence[tuple]) -> list[int]:
    """For each slot of the pool the placement group to use, so that slots of one size follow the order of the nodes.

    ``sizes[i]`` processes were placed by group ``i`` on the node with sort key ``nodes[i]``. Slots keep their size: the
    layout of ranks is what ``process_on_nodes`` says.

    >>> order_groups([2, 4, 2], ["c", "b", "a"])
    [2, 1, 0]
    """
    by_size: dict[int, list[int]] = {}
    for group in sorted(range(len(sizes)), key=lambda group: (nodes[group], group)):
        by_size.setdefault(sizes[group], []).append(group)
    queues = {size: iter(groups) for size, groups in by_size.items()}
    return [next(queues[size]) for size in sizes]


def order_places(places: Sequence[Place], nodes: Sequence[tuple], devices: Sequence[tuple[str, ...]]) -> list[int]:
    """The positions of ``places`` in rank order: by placement group, then by node, by device id and by bundle.

    ``nodes[i]`` is the sort key of the node where the process at ``places[i]`` runs, ``devices[i]`` are the ids of the
    accelerators that it sees (Ray gives bundles their devices in no promised order); empty without one.
    """

    def key(position: int) -> tuple:
        place = places[position]
        return place.group, nodes[position], [_device_key(device) for device in devices[position]], place.bundle

    return sorted(range(len(places)), key=key)


@dataclass(frozen=True)
class NodeSeat:
    """A rank's seat on its node."""

    local_rank: int
    """Position on the node."""
    local_world_size: int
    """The group's processes on the node."""
    node_rank: int
    """Position of the node in the group."""


def seats(nodes: Sequence[Hashable]) -> list[NodeSeat]:
    """The seat of each rank, where ``nodes`` names the node of each rank and ranks of a node are neighbours.

    >>> [(seat.local_rank, seat.local_world_size) for seat in seats("abb")]
    [(0, 1), (0, 2), (1, 2)]
    """
    runs = [len(list(run)) for _, run in groupby(nodes)]
    return [NodeSeat(local, size, node) for node, size in enumerate(runs) for local in range(size)]


def _device_key(device: str) -> tuple[int, int, str]:
    return (0, int(device), "") if device.isdigit() else (1, 0, device)
