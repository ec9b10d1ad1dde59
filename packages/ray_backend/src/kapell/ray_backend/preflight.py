"""Can the pool be placed at all? Answered before anything waits, with what is asked beside what the cluster has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .resources import fits

__all__ = ["InfeasiblePoolError", "NodeResources", "PoolRequest", "check_placeable", "tables"]

_SHOWN_NODES = 20


@dataclass(frozen=True)
class NodeResources:
    """One node of the cluster: all that it has, whoever uses it now."""

    name: str
    """Address, or whatever tells the node from others."""
    total: Mapping[str, float]
    """Ray resources of the node."""


@dataclass(frozen=True)
class PoolRequest:
    """What a pool asks: one entry per node, each wanting ``count`` bundles together on one node."""

    process_on_nodes: tuple[int, ...]
    """Processes per node."""
    bundle: Mapping[str, float]
    """Resources of one process."""
    strategy: str = "STRICT_PACK"
    """Ray's placement strategy within one entry: only STRICT_PACK needs them all on one node."""

    def per_node(self, count: int) -> dict[str, float]:
        """Resources of ``count`` processes."""
        return {name: amount * count for name, amount in self.bundle.items()}


class InfeasiblePoolError(ValueError):
    """The cluster, even when idle, cannot hold the pool. The message has both sides as tables."""

    def __init__(self, reason: str, request: PoolRequest, nodes: Sequence[NodeResources]) -> None:
        super().__init__(reason, request, tuple(nodes))
        self.reason = reason
        self.request = request
        self.nodes = tuple(nodes)

    def __str__(self) -> str:
        return f"{self.reason}\n{tables(self.request, self.nodes)}"


def check_placeable(request: PoolRequest, nodes: Sequence[NodeResources]) -> None:
    """Raise `InfeasiblePoolError` when an idle cluster of ``nodes`` cannot hold the request.

    Entries are placed largest first, each on the fullest node that still holds it.
    """
    for name, amount in request.bundle.items():
        wanted, present = amount * sum(request.process_on_nodes), sum(node.total.get(name, 0.0) for node in nodes)
        if wanted > present + 1e-6:
            raise InfeasiblePoolError(_total_reason(request, name, wanted, present), request, nodes)
    free = [dict(node.total) for node in nodes]
    for count in sorted(request.process_on_nodes, reverse=True):
        # Without STRICT_PACK the processes of one entry may land on several nodes.
        pieces = [count] if request.strategy == "STRICT_PACK" else [1] * count
        for piece in pieces:
            need = request.per_node(piece)
            holders = [node for node in free if fits(need, node)]
            if not holders:
                raise InfeasiblePoolError(_node_reason(piece, need), request, nodes)
            tightest = min(holders, key=lambda node: sum(node.get(name, 0.0) for name in need))
            for name, amount in need.items():
                tightest[name] -= amount


def tables(request: PoolRequest, nodes: Sequence[NodeResources]) -> str:
    """The request and the cluster as two tables with the same columns."""
    names = list(request.bundle)
    asked = [
        (f"node {index}: {count} processes", request.per_node(count))
        for index, count in enumerate(request.process_on_nodes)
    ]
    present = [(node.name, node.total) for node in nodes]
    return f"asked:\n{_table(names, asked)}\ncluster:\n{_table(names, present)}"


def _table(names: Sequence[str], rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    total = {name: sum(row.get(name, 0.0) for _, row in rows) for name in names}
    shown = [*rows[:_SHOWN_NODES], ("total", total)]
    first = max(len(label) for label, _ in shown)
    widths = {name: max(len(name), 8) for name in names}
    lines = ["  " + " " * first + "".join(f"  {name:>{widths[name]}}" for name in names)]
    for label, row in shown:
        cells = "".join(f"  {f'{row.get(name, 0.0):g}':>{widths[name]}}" for name in names)
        lines.append(f"  {label:<{first}}{cells}")
    if len(rows) > _SHOWN_NODES:
        lines.insert(-1, f"  ... and {len(rows) - _SHOWN_NODES} more")
    return "\n".join(lines)


def _total_reason(request: PoolRequest, name: str, wanted: float, present: float) -> str:
    ways_out = {
        "CPU": "ask for fewer processes, or for less than one CPU each (cpus_per_process=0.5)",
        "GPU": "ask for fewer processes, or place the pool on CPUs (use_gpu=False)",
    }
    advice = ways_out.get(name, "ask for fewer processes or add nodes")
    processes = sum(request.process_on_nodes)
    return f"{processes} processes need {wanted:g} {name} but the cluster has {present:g}; {advice}"


def _node_reason(count: int, need: Mapping[str, float]) -> str:
    wanted = ", ".join(f"{amount:g} {name}" for name, amount in need.items())
    return (
        f"no node can hold {count} processes together ({wanted}) beside the others; "
        f"spread them over more entries of process_on_nodes"
    )
