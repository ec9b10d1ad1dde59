"""Placement groups of a pool: one a node, waited for with a limit, removed when anything goes wrong."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from .ordering import node_key, order_groups
from .preflight import NodeResources, PoolRequest, check_placeable, tables

__all__ = ["PlacementTimeoutError", "cluster_nodes", "place", "release", "release_of"]

logger = logging.getLogger(__name__)

_BY = "@"  # in a placement group's name, before the id of the actor that reserved it
_REPORT_EVERY = 10.0  # seconds between two lines about a pool that waits


class PlacementTimeoutError(TimeoutError):
    """The cluster could hold the pool but did not have it free in time. Nothing of it stays reserved."""

    def __init__(
        self, waited: float, num_ready: int, request: PoolRequest, nodes: Sequence[NodeResources], free: str
    ) -> None:
        super().__init__(waited, num_ready, request, tuple(nodes), free)
        self.waited = waited
        self.num_ready = num_ready
        self.request = request
        self.nodes = tuple(nodes)
        self.free = free

    def __reduce__(self) -> tuple[Any, ...]:  # OSError, a base, keeps four of five arguments
        return type(self), (self.waited, self.num_ready, self.request, self.nodes, self.free), self.__dict__

    def __str__(self) -> str:
        return (
            f"after {self.waited:.0f} s {self.num_ready} of {len(self.request.process_on_nodes)} nodes are reserved "
            f"for the pool; others use the cluster (free: {self.free}): close their pools, or wait longer (timeout=)\n"
            f"{tables(self.request, self.nodes)}"
        )


def cluster_nodes() -> list[NodeResources]:
    """The nodes that are alive, with all that they have."""
    return [
        NodeResources(f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})", node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    ]


def place(
    request: PoolRequest, *, name: str, detached: bool = False, timeout: float = 300.0, autoscaling: bool = False
) -> list[PlacementGroup]:
    """Reserve the request and return one placement group per entry, those of one size ordered by node.

    Raises `InfeasiblePoolError` at once when even an idle cluster could not hold it (not with ``autoscaling``, where
    nodes may still come), and `PlacementTimeoutError` after ``timeout`` seconds.
    """
    if not autoscaling:
        check_placeable(request, cluster_nodes())
    # Unique names: leftovers of another run, or a second try in this one, must not collide.
    unique = f"{name}-{uuid4().hex[:8]}"
    actor_id = ray.get_runtime_context().get_actor_id()
    reserved_by = f"{_BY}{actor_id}" if actor_id and not detached else ""
    sizes = request.process_on_nodes
    start = time.monotonic()
    groups: dict[int, PlacementGroup] = {}
    try:
        # Large entries first, and smaller ones when those are reserved: a small one could take the only node that holds
        # a large one, and the pool would then wait for itself.
        for size in sorted(set(sizes), reverse=True):
            for index in [index for index, count in enumerate(sizes) if count == size]:
                groups[index] = placement_group(
                    [dict(request.bundle) for _ in range(size)],
                    strategy=request.strategy,
                    name=f"{unique}-{index}{reserved_by}",
                    lifetime="detached" if detached else None,
                )
            _wait(list(groups.values()), request, deadline=start + timeout, start=start)
        return _ordered([groups[index] for index in range(len(groups))], request)
    except BaseException:  # Ctrl-C while waiting leaves no reservation either
        release(list(groups.values()))
        raise


def release(groups: Sequence[PlacementGroup]) -> None:
    """Remove placement groups; their actors end with them."""
    for group in groups:
        remove_placement_group(group)


def release_of(actor_ids: Collection[str]) -> None:
    """Remove what workers that were ended had reserved for groups of their own.

    Ray keeps it until the program that started them ends, too.
    """
    for entry in placement_group_table().values():
        name = entry["name"]
        if name.rpartition(_BY)[2] in actor_ids and entry["state"] != "REMOVED":
            with suppress(ValueError):  # removed meanwhile
                remove_placement_group(get_placement_group(name))


def _wait(groups: Sequence[PlacementGroup], request: PoolRequest, *, start: float, deadline: float) -> None:
    reported = time.monotonic()
    # Ray counts whole seconds here; it returns as soon as the group is ready.
    while pending := [group for group in groups if not group.wait(0)]:
        if pending[0].wait(1):
            continue
        now = time.monotonic()
        num_ready = len(groups) - len(pending)
        if now - reported >= _REPORT_EVERY:
            reported = now
            logger.warning(
                "waiting %.0f s for a pool on %d nodes: %d reserved; free in the cluster: %s; asked per process: %s",
                now - start, len(request.process_on_nodes), num_ready, _free(request), dict(request.bundle),
            )  # fmt: skip
        if now >= deadline:
            raise PlacementTimeoutError(now - start, num_ready, request, cluster_nodes(), _free(request))


def _free(request: PoolRequest) -> str:
    free = ray.available_resources()
    return ", ".join(f"{free.get(resource, 0):g} {resource}" for resource in request.bundle)


def _ordered(groups: Sequence[PlacementGroup], request: PoolRequest) -> list[PlacementGroup]:
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    keys = []
    for group in groups:
        node_id = placement_group_table(group)["bundles_to_node_id"][0]
        node = nodes[node_id]
        keys.append(node_key(node["NodeManagerAddress"], node["NodeName"], node_id))
    return [groups[index] for index in order_groups(request.process_on_nodes, keys)]
