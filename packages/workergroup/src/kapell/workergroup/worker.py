"""The base class of workers: one rank of a group, with its place in the group and in each mesh."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from kapell.decorators import Dispatch, Execute, register

from .environment import current_worker_env

__all__ = ["Worker"]

_Entry = TypeVar("_Entry")


class _DeviceMesh(Protocol):
    """The part of torch's ``DeviceMesh`` that a worker needs to find its data-parallel rank."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...

    def get_local_rank(self, mesh_dim: str) -> int: ...


class Worker:
    """One rank of a worker group.

    A subclass labels the methods that the group offers with ``@register``. Call ``super().__init__()`` first: it reads
    the worker's place (``rank``, ``world_size``, ...) from its environment.
    """

    fused_worker_dict: Mapping[str, Any] = MappingProxyType({})
    """The workers of all roles in this process, by role; empty unless colocated (verl's name)."""

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        env = current_worker_env()
        missing = [name for name in ("RANK", "WORLD_SIZE") if name not in env]
        if missing:
            raise RuntimeError(
                f"{type(self).__name__} needs {' and '.join(missing)} in its environment; create it through a worker "
                "group, or set the variables as torchrun does"
            )
        self._rank = int(env["RANK"])
        self._world_size = int(env["WORLD_SIZE"])
        self._local_rank = int(env.get("LOCAL_RANK", "0"))
        self._local_world_size = int(env.get("LOCAL_WORLD_SIZE", "1"))
        self._master_addr = env.get("MASTER_ADDR", "")
        self._master_port = env.get("MASTER_PORT", "")
        if cuda_visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices
        self._dispatch_dp_rank: dict[str, int] = {}
        self._collect_dp_rank: dict[str, bool] = {}
        self._mesh_places: dict[str, dict[str, int]] = {}

    @property
    def rank(self) -> int:
        """This worker's rank in its group."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of workers of the group."""
        return self._world_size

    @property
    def local_rank(self) -> int:
        """This worker's position on its node."""
        return self._local_rank

    @property
    def local_world_size(self) -> int:
        """The number of the group's workers on this node."""
        return self._local_world_size

    def get_master_addr_port(self) -> tuple[str, str]:
        """Address and port at which the group's ``torch.distributed`` processes meet."""
        return self._master_addr, self._master_port

    def get_cuda_visible_devices(self) -> str:
        """The accelerators that this worker sees, as in ``CUDA_VISIBLE_DEVICES``; "not set" without any."""
        return current_worker_env().get("CUDA_VISIBLE_DEVICES", "not set")

    def get_fused_worker_by_name(self, worker_name: str) -> Any:
        """The worker of another role in this process, or None."""
        return self.fused_worker_dict.get(worker_name)

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Say this worker's data-parallel rank in a mesh, and whether its result is the one collected for that rank."""
        if mesh_name in self._dispatch_dp_rank:
            raise ValueError(
                f"mesh {mesh_name!r} is already registered on rank {self.rank} with dp rank "
                f"{self._dispatch_dp_rank[mesh_name]}; known meshes: {sorted(self._dispatch_dp_rank)}"
            )
        self._dispatch_dp_rank[mesh_name] = int(dp_rank)
        self._collect_dp_rank[mesh_name] = bool(is_collect)
        self._mesh_places[mesh_name] = {"dp": int(dp_rank)}

    def register_device_mesh(self, mesh_name: str, device_mesh: _DeviceMesh, *, dp: str = "dp") -> None:
        """Register a torch ``DeviceMesh``: dimension ``dp`` splits the rows, the first rank of all others is collected.

        Raises ``ValueError`` when the mesh has no dimension of that name.
        """
        names = device_mesh.mesh_dim_names or ()
        if dp not in names:
            raise ValueError(f"device mesh {mesh_name!r} has dimensions {names}, none named {dp!r}; give dp=<name>")
        is_collect = all(device_mesh.get_local_rank(name) == 0 for name in names if name != dp)
        self._register_dispatch_collect_info(mesh_name, device_mesh.get_local_rank(dp), is_collect)
        self._mesh_places[mesh_name] = {name: device_mesh.get_local_rank(name) for name in names}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> int:
        return self._mesh_entry(self._dispatch_dp_rank, mesh_name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_collect_info(self, mesh_name: str) -> bool:
        return self.query_collect_info(mesh_name)

    def query_collect_info(self, mesh_name: str) -> bool:
        """Whether this worker's result is collected in the mesh."""
        return self._mesh_entry(self._collect_dp_rank, mesh_name)

    @property
    def mesh_places(self) -> dict[str, dict[str, int]]:
        """This worker's coordinates in each mesh that it registered, such as ``{"train": {"dp": 1, "tp": 0}}``."""
        return getattr(self, "_mesh_places", {})

    def query_mesh_places(self) -> dict[str, dict[str, int]]:
        """`mesh_places`, as a method for the group to call."""
        return self.mesh_places

    def query_mesh_entry(self, mesh_name: str) -> tuple[int, bool] | None:
        """This worker's data-parallel rank in a mesh and whether it is collected; None when it registered no such."""
        if mesh_name not in self.mesh_places:
            return None
        return self._dispatch_dp_rank[mesh_name], self._collect_dp_rank[mesh_name]

    def _mesh_entry(self, table: Mapping[str, _Entry], mesh_name: str) -> _Entry:
        if mesh_name not in table:
            raise KeyError(
                f"mesh {mesh_name!r} is not registered on rank {self.rank} of {type(self).__name__}; call "
                f"_register_dispatch_collect_info in its constructor; known meshes: {sorted(table)}"
            )
        return table[mesh_name]

    def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
        """The data-parallel rank and the collect flag by mesh name, as keyword arguments of `set_dispatch_collect`."""
        return {"dispatch_dp_rank": dict(self._dispatch_dp_rank), "collect_dp_rank": dict(self._collect_dp_rank)}

    def set_dispatch_collect(
        self, mesh_name: str, dispatch_dp_rank: Mapping[str, int], collect_dp_rank: Mapping[str, bool]
    ) -> None:
        """Take over, under ``mesh_name``, the place that another worker of this process has in its only mesh."""
        if len(dispatch_dp_rank) != 1 or dispatch_dp_rank.keys() != collect_dp_rank.keys():
            raise ValueError(
                f"mesh {mesh_name!r} needs one dp rank and its collect flag, got {dict(dispatch_dp_rank)} and "
                f"{dict(collect_dp_rank)}"
            )
        (dp_rank,), (is_collect,) = dispatch_dp_rank.values(), collect_dp_rank.values()
        self._register_dispatch_collect_info(mesh_name, dp_rank, is_collect)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``func(worker, *args, **kwargs)`` on every rank with the arguments split over the ranks."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``func(*args, **kwargs)`` on rank 0."""
        return func(*args, **kwargs)
