"""The pools of a whole program, by the roles that they serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .placement import cluster_nodes
from .pools import RayResourcePool
from .preflight import PoolRequest, check_placeable

__all__ = ["ResourcePoolManager"]


@dataclass
class ResourcePoolManager:
    """The pools of a program and the role that each serves.

    Several roles may name one pool: their groups then share its processes.
    """

    resource_pool_spec: Mapping[str, Sequence[int]]
    """Pool name to processes per node."""
    mapping: Mapping[Any, str]
    """Role to pool name."""
    max_colocate_count: int = 3
    """Groups that can share one pool."""
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)
    """The pools made so far, by name."""
    use_gpu: bool = True
    """Whether each process holds an accelerator."""

    def create_resource_pool(self) -> None:
        """Make all pools, after checking that the cluster can hold them together."""
        pools = {
            name: RayResourcePool(
                counts, use_gpu=self.use_gpu, name_prefix=name, max_colocate_count=self.max_colocate_count
            )
            for name, counts in self.resource_pool_spec.items()
        }
        if pools:
            together = [count for pool in pools.values() for count in pool.store]
            bundle = next(iter(pools.values())).resources.bundle
            check_placeable(PoolRequest(tuple(together), bundle), cluster_nodes())
        self.resource_pool_dict.update(pools)

    def get_resource_pool(self, role: Any) -> RayResourcePool:
        """The pool of a role. Raises ``KeyError`` that lists the roles or the pools."""
        if role not in self.mapping:
            raise KeyError(f"no pool is named for role {role!r}; roles: {', '.join(map(str, self.mapping))}")
        name = self.mapping[role]
        if name not in self.resource_pool_dict:
            made = ", ".join(self.resource_pool_dict) or "none"
            raise KeyError(
                f"pool {name!r} of role {role!r} does not exist; pools made: {made}; call create_resource_pool()"
            )
        return self.resource_pool_dict[name]

    def get_n_gpus(self) -> int:
        """The number of processes of all pools together."""
        return sum(count for counts in self.resource_pool_spec.values() for count in counts)
