"""The meshes of a group, as its workers registered them, and the part of a mesh that a slice of the group has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from kapell.decorators import MeshLayout

__all__ = ["GroupMeshes", "layout_of"]


class _MeshedGroup(Protocol):
    @property
    def _dispatch_info(self) -> dict[str, list[int]]: ...

    def mesh(self, name: str) -> MeshLayout: ...


class GroupMeshes(Mapping[str, MeshLayout]):
    """The meshes of a group by name; asks the workers when a mesh is first needed."""

    def __init__(self, group: _MeshedGroup) -> None:
        self._group = group

    def __getitem__(self, name: str) -> MeshLayout:
        return self._group.mesh(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._group._dispatch_info)

    def __len__(self) -> int:
        return len(self._group._dispatch_info)


def layout_of(name: str, role: str, entries: Sequence[tuple[int, bool] | None], *, whole: bool) -> MeshLayout:
    """The layout from what each rank registered: its data-parallel rank and whether it is collected.

    For a slice of the group (not ``whole``), data-parallel ranks are counted anew, and where none of the slice's ranks
    is collected, the first one is. Raises ``KeyError`` when a rank has not registered the mesh.
    """
    missing = [rank for rank, entry in enumerate(entries) if entry is None]
    if missing:
        raise KeyError(
            f"mesh {name!r} is not registered on rank {', '.join(map(str, missing))} of {role!r}; each worker calls "
            "_register_dispatch_collect_info (or register_device_mesh) in its constructor"
        )
    registered = [entry for entry in entries if entry is not None]
    dp_ranks, collect = [entry[0] for entry in registered], [entry[1] for entry in registered]
    return MeshLayout(tuple(dp_ranks), tuple(collect)) if whole else _part_of_mesh(dp_ranks, collect)


def _part_of_mesh(dp_ranks: Sequence[int], collect: Sequence[bool]) -> MeshLayout:
    present = sorted(set(dp_ranks))
    collectors = {}
    for dp_rank in present:
        members = [position for position, own in enumerate(dp_ranks) if own == dp_rank]
        collectors[dp_rank] = next((position for position in members if collect[position]), members[0])
    return MeshLayout(
        tuple(present.index(dp_rank) for dp_rank in dp_ranks),
        tuple(collectors[dp_rank] == position for position, dp_rank in enumerate(dp_ranks)),
    )
