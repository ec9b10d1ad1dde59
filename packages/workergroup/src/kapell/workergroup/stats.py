"""A group's accounting as a table: what its methods cost, in all and per rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .accounting import CallRecord, RankCost

__all__ = ["GroupStats", "MethodStats", "RankStats"]

_SECONDS = ("serialize", "queue", "run", "collect")


@dataclass(frozen=True)
class RankStats:
    """What one rank's shares of a method's calls cost."""

    rank: int
    calls: int
    bytes_in: int
    bytes_out: int
    serialize: float
    queue: float
    run: float
    collect: float


@dataclass(frozen=True)
class MethodStats:
    """The calls of one method of one role."""

    role: str
    method: str
    calls: int
    failed: int
    """Calls that ended in an error."""
    seconds: float
    """From planning to the joined result, all finished calls together."""
    sent: int
    """Bytes of arguments that the controller itself sent: each distinct value once, and nothing of futures."""
    fetched: int
    """Bytes of results that came to the controller: 0 as long as a future is only passed on."""
    ranks: tuple[RankStats, ...]
    """The same for each rank, in rank order."""

    @property
    def slowest(self) -> RankStats:
        """The rank that ran longest."""
        return max(self.ranks, key=lambda rank: rank.run)


@dataclass(frozen=True)
class GroupStats:
    """All methods of a group; ``print(group.stats())`` shows a table. Seconds per rank are means over the ranks."""

    num_calls: int
    """Calls the group has made; the table covers those that are still kept."""
    methods: tuple[MethodStats, ...]

    def __getitem__(self, method: str) -> MethodStats:
        for entry in self.methods:
            if entry.method == method:
                return entry
        raise KeyError(f"no call of {method!r}; called: {', '.join(entry.method for entry in self.methods) or 'none'}")

    def __str__(self) -> str:
        kept = sum(entry.calls for entry in self.methods)
        header = [
            "role",
            "method",
            "calls",
            "failed",
            "seconds",
            "sent",
            "fetched",
            "in",
            "out",
            "serialize",
            "queue",
            "run",
            "collect",
            "slowest",
        ]
        body = [_row(entry) for entry in self.methods]
        rows = [header, *body]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"last {kept} of {self.num_calls} calls; seconds per rank", *lines])

    @staticmethod
    def of(records: Iterable[CallRecord], num_calls: int) -> GroupStats:
        """Sum up records."""
        by_method: dict[tuple[str, str], list[CallRecord]] = {}
        for record in records:
            by_method.setdefault((record.role, record.method), []).append(record)
        methods = [_method_stats(role, method, calls) for (role, method), calls in by_method.items()]
        return GroupStats(num_calls, tuple(methods))


def _method_stats(role: str, method: str, calls: Sequence[CallRecord]) -> MethodStats:
    by_rank: dict[int, list[RankCost]] = {}
    for record in calls:
        for cost in record.costs():
            by_rank.setdefault(cost.rank, []).append(cost)
    return MethodStats(
        role=role,
        method=method,
        calls=len(calls),
        failed=sum(bool(record.error) for record in calls),
        seconds=sum(record.ended - record.began for record in calls if record.ended is not None),
        sent=sum(record.sent for record in calls),
        fetched=sum(record.fetched for record in calls),
        ranks=tuple(_rank_stats(rank, costs) for rank, costs in sorted(by_rank.items())),
    )


def _rank_stats(rank: int, costs: Sequence[RankCost]) -> RankStats:
    return RankStats(
        rank=rank,
        calls=len(costs),
        bytes_in=sum(cost.bytes_in for cost in costs),
        bytes_out=sum(cost.bytes_out for cost in costs),
        serialize=sum(cost.serialize for cost in costs),
        queue=sum(cost.queue or 0.0 for cost in costs),
        run=sum(cost.run or 0.0 for cost in costs),
        collect=sum(cost.collect for cost in costs),
    )


def _row(entry: MethodStats) -> list[str]:
    ranks = entry.ranks
    means = [
        sum(getattr(rank, name) for rank in ranks) / len(ranks) for name in ("serialize", "queue", "run", "collect")
    ]
    return [
        entry.role,
        entry.method,
        str(entry.calls),
        str(entry.failed),
        f"{entry.seconds:.6f}",
        _bytes_text(entry.sent),
        _bytes_text(entry.fetched),
        _bytes_text(sum(rank.bytes_in for rank in ranks)),
        _bytes_text(sum(rank.bytes_out for rank in ranks)),
        *[f"{mean:.6f}" for mean in means],
        f"rank {entry.slowest.rank}: {entry.slowest.run:.6f}",
    ]


def _bytes_text(count: float) -> str:
    """A size for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
