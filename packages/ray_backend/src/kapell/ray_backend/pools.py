"""Resource pools on Ray: reserved as placement groups when first used, split and merged by ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from ray.util.placement_group import PlacementGroup

from kapell.workergroup import ResourcePool

from .ordering import Place
from .placement import place, release
from .preflight import PoolRequest
from .resources import ProcessResources
from .session import check_session, this_session

__all__ = [
    "RayResourcePool",
    "SubRayResourcePool",
    "merge_resource_pool",
    "split_resource_pool",
]

_NPU = "NPU"


class RayResourcePool(ResourcePool):
    """Processes on the nodes of a Ray cluster: ``process_on_nodes`` has one entry per node.

    Reserved at the first use. Each process holds ``cpus_per_process`` CPUs and, with ``use_gpu``, one ``accelerator``;
    the worker groups on the pool (up to ``max_colocate_count``) share them. Ranks follow the nodes' addresses.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
        *,
        accelerator: str = "GPU",
        accelerators_per_process: int = 1,
        cpus_per_process: float = 1.0,
        timeout: float = 300.0,
        autoscaling: bool = False,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix or f"pool-{uuid4().hex[:6]}"
        self.detached = detached
        self.accelerator_type = accelerator_type
        self.accelerator = accelerator
        self.accelerators_per_process = accelerators_per_process
        self.cpus_per_process = cpus_per_process
        self.timeout = timeout
        self.autoscaling = autoscaling
        self.pgs: list[PlacementGroup] | None = None
        self._session: tuple[str, str] | None = None
        self._places = [Place(node, bundle) for node, count in enumerate(self.store) for bundle in range(count)]
        _ = self.resources.bundle  # refuses odd amounts here rather than at the first use

    @property
    def resources(self) -> ProcessResources:
        """What one process holds."""
        return ProcessResources(
            cpus=self.cpus_per_process,
            accelerator=self.accelerator if self.use_gpu else "",
            accelerators=self.accelerators_per_process,
            accelerator_type=(self.accelerator_type or "") if self.use_gpu else "",
            colocate_count=self.max_colocate_count,
        )

    @property
    def places(self) -> list[Place]:
        """Where each process lies: position in the list that `get_placement_groups` returns, and bundle."""
        return list(self._places)

    def request(self, strategy: str = "STRICT_PACK") -> PoolRequest:
        """What the pool asks of the cluster."""
        return PoolRequest(tuple(self.store), self.resources.bundle, strategy)

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> list[PlacementGroup]:
        """The pool's placement groups, one per node; the first call in a session of Ray reserves them and waits.

        ``device_name="npu"`` asks for Ray's resource NPU. Raises `InfeasiblePoolError` or `PlacementTimeoutError`.
        """
        if self.pgs is None or self._has_ended():
            if device_name == "npu" and self.accelerator == "GPU":
                self.accelerator = _NPU
            self.pgs = place(
                self.request(strategy),
                name=name or self.name_prefix,
                detached=self.detached,
                timeout=self.timeout,
                autoscaling=self.autoscaling,
            )
            self._session = this_session()
        return self.pgs

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._session = this_session()  # that of the process that it was sent to

    def _has_ended(self) -> bool:
        """Whether the reservation ended with its session of Ray."""
        return not self.detached and self._session != this_session()

    def close(self) -> None:
        """Give the reservation back; workers on it end. Harmless when repeated; a later use reserves anew."""
        ended = self._has_ended()
        groups, self.pgs = self.pgs, None
        if groups and not ended:
            release(groups)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def split(self, split_size: int | Sequence[int]) -> list[ResourcePool]:
        """Cut the ranks, in order, into pools of the given sizes; see `split_resource_pool`."""
        return list(split_resource_pool(self, split_size))

    def _merged(self, pools: Sequence[ResourcePool]) -> RayResourcePool:
        return _merge(pools)

    def _settings(self) -> dict[str, Any]:
        return {
            "use_gpu": self.use_gpu,
            "max_colocate_count": self.max_colocate_count,
            "detached": self.detached,
            "accelerator_type": self.accelerator_type,
            "accelerator": self.accelerator,
            "accelerators_per_process": self.accelerators_per_process,
            "cpus_per_process": self.cpus_per_process,
        }


class SubRayResourcePool(RayResourcePool):
    """Some ranks of a reserved pool. It lives as long as that pool: closing it gives nothing back.

    ``process_on_nodes`` describes the whole of ``placement_groups``; the ``subgroup_world_size`` ranks of it that start
    at ``start_bundle_index`` belong to this pool.
    """

    def __init__(
        self,
        placement_groups: Sequence[PlacementGroup],
        start_bundle_index: int,
        subgroup_world_size: int,
        *,
        process_on_nodes: Sequence[int],
        **settings: Any,
    ) -> None:
        whole = [Place(node, bundle) for node, count in enumerate(process_on_nodes) for bundle in range(count)]
        stop = start_bundle_index + subgroup_world_size
        if not 0 <= start_bundle_index < stop <= len(whole):
            raise ValueError(
                f"ranks {start_bundle_index} to {stop - 1} are not in a pool of {len(whole)} processes; give a start "
                f"from 0 and at least 1 process"
            )
        self._init_from(placement_groups, whole[start_bundle_index:stop], settings)
        self.start_bundle_index = start_bundle_index
        self.subgroup_world_size = subgroup_world_size

    @classmethod
    def _of_places(
        cls, placement_groups: Sequence[PlacementGroup], places: Sequence[Place], settings: Mapping[str, Any]
    ) -> SubRayResourcePool:
        pool = cls.__new__(cls)
        pool._init_from(placement_groups, places, settings)
        pool.start_bundle_index = places[0].bundle
        pool.subgroup_world_size = len(places)
        return pool

    def _init_from(
        self, placement_groups: Sequence[PlacementGroup], places: Sequence[Place], settings: Mapping[str, Any]
    ) -> None:
        counts = [len(list(run)) for _, run in groupby(places, key=lambda place: place.group)]
        super().__init__(counts, **settings)
        self._places = list(places)
        self.pgs = list(placement_groups)
        self._session = this_session()

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> list[PlacementGroup]:
        """Those of the pool that this one was cut from. Raises `EndedSessionError` if they ended with Ray."""
        if not self.detached:
            check_session(self._session, f"pool {self.name_prefix!r}")
        return super().get_placement_groups(strategy, name, device_name)

    def close(self) -> None:
        """Nothing to give back: the pool that this one was cut from holds the reservation."""


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | Sequence[int]) -> list[SubRayResourcePool]:
    """Cut the ranks of a pool, in order, into pools of ``split_size`` each (or of the sizes in a list).

    A part may span nodes, nodes may be of different sizes, and a part can be split again. Reserves the pool if that has
    not happened yet. Raises ``ValueError`` when the sizes do not add up to the world size.
    """
    sizes = [sum(counts) for counts in resource_pool.split_sizes(split_size)]
    groups = resource_pool.get_placement_groups()
    places = resource_pool.places
    return [
        SubRayResourcePool._of_places(
            groups,
            places[start : start + size],
            {**resource_pool._settings(), "name_prefix": f"{resource_pool.name_prefix}_split_{index}"},
        )
        for index, (start, size) in enumerate(zip(accumulate([0, *sizes[:-1]]), sizes, strict=True))
    ]


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """Join two reserved pools: the ranks of ``rp1``, then those of ``rp2``; parts of one node come together again.

    The pools keep their own reservations. Raises ``ValueError`` when their processes differ in what they hold.
    """
    return _merge([rp1, rp2])


def _merge(pools: Sequence[ResourcePool]) -> RayResourcePool:
    ray_pools = [pool for pool in pools if isinstance(pool, RayResourcePool)]
    if len(ray_pools) < len(pools):
        kinds = ", ".join(sorted({type(pool).__name__ for pool in pools}))
        raise TypeError(f"cannot merge pools of different backends, got {kinds}; make all with one backend")
    first = ray_pools[0]._settings()
    for pool in ray_pools[1:]:
        other = pool._settings()
        if differing := [name for name in first if first[name] != other[name]]:
            pairs = ", ".join(f"{name}: {first[name]!r} and {other[name]!r}" for name in differing)
            raise ValueError(f"cannot merge pools that differ in {pairs}; make all with the same settings")
    groups: list[PlacementGroup] = []
    position: dict[Any, int] = {}
    places: list[Place] = []
    for pool in ray_pools:
        own = pool.get_placement_groups()
        for spot in pool.places:
            group = own[spot.group]
            if group.id not in position:
                position[group.id] = len(groups)
                groups.append(group)
            places.append(Place(position[group.id], spot.bundle))
    if len(set(places)) != len(places):
        raise ValueError(f"cannot merge pools that share processes: {' and '.join(map(repr, ray_pools))} overlap")
    places.sort(key=lambda spot: spot.group)  # stable: order within a node stays
    name_prefix = "_".join(pool.name_prefix for pool in ray_pools)
    return SubRayResourcePool._of_places(groups, places, {**first, "name_prefix": name_prefix})
