"""What each call cost: bytes and seconds per rank, always on; kept for the last calls of a group."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from .answering import RunTime

__all__ = ["CallRecord", "Ledger", "RankCost"]

_KEPT_CALLS = 1024  # more would cost the garbage collector time in every call
_KEPT_RANK_COSTS = 65_536  # about 10 MB: 16 calls of 4,096 ranks


@dataclass(frozen=True, slots=True)
class RankCost:
    """What one rank's share of a call cost."""

    rank: int
    """The worker's rank in the whole group."""
    bytes_in: int
    """Size of its arguments, as far as their types say it."""
    bytes_out: int
    """Size of its result, likewise; 0 if it did not come to the controller."""
    serialize: float
    """Seconds until its arguments were on their way."""
    queue: float | None
    """Seconds from there until the method began; None while the worker has not told when it ran."""
    run: float | None
    """Seconds in the method; None likewise."""
    collect: float
    """Seconds to fetch its result."""


@dataclass(slots=True)
class CallRecord:
    """One call of a group while it is made, and afterwards. Lists have one entry per running rank."""

    number: int
    role: str
    method: str
    began: float
    """When planning began, in seconds since the epoch."""
    ranks: Sequence[int]
    bytes_in: list[int]
    bytes_out: list[int] = field(default_factory=list)
    put_seconds: float = 0.0
    """To make the arguments ready, all ranks together."""
    sending: list[float] = field(default_factory=list)
    """When each rank's share was begun to be sent, and at the end when the last one was sent."""
    collect: list[float] = field(default_factory=list)
    runs: dict[int, RunTime] = field(default_factory=dict)
    ended: float | None = None
    error: str = ""
    sent: int = 0
    """Bytes of arguments that the controller itself sent, each distinct value once."""
    fetched_apart: int = 0
    """Bytes of results that the controller fetched in another way than as the collected result of the call."""

    @property
    def fetched(self) -> int:
        """Bytes of results that came to the controller; none of a call whose future is only passed on."""
        return sum(self.bytes_out) + self.fetched_apart

    def costs(self) -> list[RankCost]:
        """The cost of each rank."""
        put = self.put_seconds / len(self.ranks)
        costs = []
        for slot, rank in enumerate(self.ranks):
            begun, sent = self.sending[slot], self.sending[slot + 1]
            run = self.runs.get(rank)
            # A serial worker runs inside the sending.
            serialize = put + (sent if run is None else max(begun, min(run.started, sent))) - begun
            queue = None if run is None else max(0.0, run.started - sent)
            seconds = None if run is None else run.finished - run.started
            costs.append(
                RankCost(rank, self.bytes_in[slot], self.bytes_out[slot], serialize, queue, seconds, self.collect[slot])
            )
        return costs

    def end(self, error: str = "") -> None:
        """Note that the call is over."""
        if self.ended is None:
            self.ended = time.time()
            self.error = error


class Ledger:
    """The records of a group's last calls."""

    def __init__(self) -> None:
        self._records: OrderedDict[int, CallRecord] = OrderedDict()  # by number, oldest first
        self._kept = 0
        self._number = 0
        # Workers may log calls of several programs; 30 bits, since pickle is slower with longer numbers.
        self.first: Final = int.from_bytes(os.urandom(4)) >> 2
        """Added to the numbers of the group's calls, it gives those that workers log, which no other group's have."""

    @property
    def num_calls(self) -> int:
        """How many calls the group has made, those that are no longer kept included."""
        return self._number

    def open(self, role: str, method: str, began: float, ranks: Sequence[int]) -> CallRecord:
        """The record of a new call."""
        size = len(ranks)
        number = self._number = self._number + 1
        record = CallRecord(number, role, method, began, ranks, [0] * size, [0] * size, 0.0, [], [0.0] * size)
        records = self._records
        records[number] = record
        self._kept += size
        while len(records) > _KEPT_CALLS or (self._kept > _KEPT_RANK_COSTS and len(records) > 1):
            _, oldest = records.popitem(last=False)
            self._kept -= len(oldest.ranks)
        return record

    def add_run_times(self, times: Mapping[int, Iterable[RunTime]]) -> None:
        """Take over what workers logged."""
        for rank, runs in times.items():
            for run in runs:
                if record := self._records.get(run.number - self.first):
                    record.runs[rank] = run

    @property
    def records(self) -> list[CallRecord]:
        """The kept records that were sent completely, oldest first."""
        return [record for record in list(self._records.values()) if len(record.sending) == len(record.ranks) + 1]
