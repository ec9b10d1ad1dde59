"""The shape of a group: how many ranks, and which of them share the rows of a data-parallel rank."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Protocol

__all__ = ["Group", "GroupShape", "MeshLayout"]


class Group(Protocol):
    """What the functions of a custom mode may ask of the group that calls them."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def role(self) -> str:
        """Name of the group in messages, such as "actor"; may be empty."""
        ...

    def mesh(self, name: str) -> "MeshLayout":
        """The layout that the workers registered under `name`; asked of them once, then kept."""
        ...

    @property
    def _dispatch_info(self) -> dict[str, list[int]]:
        """Mesh name -> data-parallel rank of each rank (verl's name)."""
        ...

    @property
    def _collect_info(self) -> dict[str, list[bool]]:
        """Mesh name -> whether each rank's result is collected (verl's name)."""
        ...


@dataclass(frozen=True)
class MeshLayout:
    """Which data-parallel rank each rank works for, and whose results are collected. Checked when made.

    Any mapping will do; every data-parallel rank from 0 on needs a rank and exactly one collector.

    >>> layout = MeshLayout(dp_ranks=(0, 1, 0, 1), collect=(False, True, True, False))
    >>> layout.dp_size, layout.collect_ranks
    (2, (2, 1))
    """

    dp_ranks: tuple[int, ...]
    """Data-parallel rank of each rank, indexed by rank."""
    collect: tuple[bool, ...]
    """Whether each rank's result is collected, indexed by rank."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dp_ranks", tuple(int(rank) for rank in self.dp_ranks))
        object.__setattr__(self, "collect", tuple(bool(flag) for flag in self.collect))
        if len(self.dp_ranks) != len(self.collect):
            raise ValueError(f"a mesh of {len(self.dp_ranks)} dp_ranks has {len(self.collect)} collect flags")
        if not self.dp_ranks:
            raise ValueError("a mesh needs at least one rank")
        members: dict[int, list[int]] = {}
        for rank, dp_rank in enumerate(self.dp_ranks):
            if dp_rank < 0:
                raise ValueError(f"rank {rank} registered the negative data-parallel rank {dp_rank}")
            members.setdefault(dp_rank, []).append(rank)
        size = max(members) + 1
        if len(members) < size:
            missing = [dp_rank for dp_rank in range(size) if dp_rank not in members]
            raise ValueError(
                f"no rank registered the data-parallel ranks {missing} of {size}; rows for them would be lost"
            )
        for dp_rank, ranks in sorted(members.items()):
            collectors = [rank for rank in ranks if self.collect[rank]]
            if len(collectors) != 1:
                found = f"has the collectors {collectors}" if collectors else f"(ranks {ranks}) has no collector"
                raise ValueError(
                    f"data-parallel rank {dp_rank} {found}; exactly one rank must register is_collect=True"
                )

    @staticmethod
    @lru_cache(maxsize=16)
    def flat(world_size: int) -> "MeshLayout":
        """Every rank is a data-parallel rank of its own, and collected."""
        return MeshLayout(tuple(range(world_size)), (True,) * world_size)

    @cached_property
    def dp_size(self) -> int:
        """Number of distinct shards."""
        return max(self.dp_ranks) + 1

    @cached_property
    def collect_ranks(self) -> tuple[int, ...]:
        """The collected rank of each data-parallel rank, in data-parallel order."""
        collectors = [rank for rank, flag in enumerate(self.collect) if flag]
        return tuple(sorted(collectors, key=self.dp_ranks.__getitem__))


@dataclass(frozen=True)
class GroupShape:
    """All that planning a call needs to know of a group; stands in for the group in tests.

    >>> GroupShape(2).world_size
    2
    """

    world_size: int
    """Number of ranks."""
    role: str = ""
    """Name of the group in messages."""
    meshes: Mapping[str, MeshLayout] = field(default_factory=dict)
    """Layouts by mesh name."""
    writers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Column -> the methods that write it, such as `{"values": ("critic.compute_values",)}`; see `known_writers`."""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"a group has at least one rank, got world_size={self.world_size}")
        for name, layout in self.meshes.items():
            if len(layout.dp_ranks) != self.world_size:
                raise ValueError(f"mesh {name!r} maps {len(layout.dp_ranks)} ranks; the group has {self.world_size}")

    def mesh(self, name: str) -> MeshLayout:
        """The layout of the mesh `name`."""
        try:
            return self.meshes[name]
        except KeyError:
            close = difflib.get_close_matches(name, self.meshes, n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            known = ", ".join(sorted(self.meshes)) or "none"
            raise ValueError(
                f"mesh {name!r} is not registered{meant} (known: {known}); each worker registers its data-parallel "
                "rank and whether it is collected under the mesh's name"
            ) from None

    @property
    def _dispatch_info(self) -> dict[str, list[int]]:
        return {name: list(layout.dp_ranks) for name, layout in self.meshes.items()}

    @property
    def _collect_info(self) -> dict[str, list[bool]]:
        return {name: list(layout.collect) for name, layout in self.meshes.items()}

    @staticmethod
    def of(group: Any) -> "GroupShape":
        """The shape of a group, without asking it for its meshes."""
        if isinstance(group, GroupShape):
            return group
        return GroupShape(group.world_size, getattr(group, "role", ""))
