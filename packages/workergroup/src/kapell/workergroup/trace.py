"""Calls on a timeline: the trace format of Chrome, which Perfetto (https://ui.perfetto.dev) opens.

Each group is a process with one row for the controller and one for each rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from .accounting import CallRecord

__all__ = ["save_trace", "trace_events"]

_CONTROLLER = 0  # row of the controller; rank r has row r + 1


class _Traced(Protocol):
    def trace_events(self) -> list[dict[str, Any]]: ...


def save_trace(path: str | PathLike[str], groups: Iterable[_Traced]) -> None:
    """Write the last calls of ``groups`` to a JSON file, all ranks on one timeline.

    Groups that share their workers, such as roles spawned from one group, share the calls too: give one of them.
    """
    events = []
    for process, group in enumerate(groups, start=1):
        events += [{**event, "pid": process} for event in group.trace_events()]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def trace_events(records: Sequence[CallRecord], name: str) -> list[dict[str, Any]]:
    """The events of one group. Times are microseconds since the epoch, by each machine's own clock."""
    ranks = sorted({rank for record in records for rank in record.ranks})
    events = [_named("process_name", _CONTROLLER, name), _named("thread_name", _CONTROLLER, "controller")]
    events += [_named("thread_name", rank + 1, f"rank {rank}") for rank in ranks]
    for record in records:
        title = f"{record.role}.{record.method}"
        arguments = {"call": record.number, "error": record.error}
        sent = record.sending[-1]
        ended = record.ended if record.ended is not None else sent
        events.append(_span(title, _CONTROLLER, record.began, ended, arguments))
        events.append(_span("plan and send", _CONTROLLER, record.began, sent, {"call": record.number}))
        costs = {cost.rank: cost for cost in record.costs()}
        for rank, run in sorted(record.runs.items()):
            cost = costs[rank]
            details = {
                **arguments,
                "bytes_in": cost.bytes_in,
                "bytes_out": cost.bytes_out,
                "serialize": cost.serialize,
                "queue": cost.queue,
                "collect": cost.collect,
            }
            events.append(_span(title, rank + 1, run.started, run.finished, details))
    return events


def _named(kind: str, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 1, "tid": row, "args": {"name": name}}


def _span(name: str, row: int, began: float, ended: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": 1,
        "tid": row,
        "ts": began * 1e6,
        "dur": max(0.0, ended - began) * 1e6,
        "args": args,
    }
