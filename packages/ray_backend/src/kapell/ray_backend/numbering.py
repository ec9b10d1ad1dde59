"""The numbers of calls that go to a worker by name alone: the worker logs when they ran by Ray's id of the task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ray

from kapell.workergroup import RunTime

__all__ = ["CallNumbers", "number_of_task"]

_KEPT = 65_536  # as many costs of ranks as a group's ledger keeps


def number_of_task(task_id: str) -> int:
    """A number for a task, which no call of a group has: those are positive."""
    return -int(task_id, 16)


class CallNumbers:
    """The numbers of the last calls by the tasks that they became."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # by `number_of_task`, oldest first

    def note(self, ref: ray.ObjectRef, number: int) -> None:
        """The call with this number became the task whose answer ``ref`` is."""
        if len(self._numbers) >= _KEPT:
            del self._numbers[next(iter(self._numbers))]
        self._numbers[number_of_task(ref.task_id().hex())] = number

    def numbered(self, times: Mapping[int, Sequence[RunTime]]) -> dict[int, list[RunTime]]:
        """What workers logged, by the calls' numbers; what another program has called is left out."""
        return {
            rank: [
                run if run.number >= 0 else run._replace(number=self._numbers.pop(run.number))
                for run in runs
                if run.number >= 0 or run.number in self._numbers
            ]
            for rank, runs in times.items()
        }
