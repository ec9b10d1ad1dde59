"""What a non-blocking call returns whose ranks' rows are joined into a batch: a pending call and a `DataProtoFuture`.

Apart from `pending`, since `kapell.protocol` brings torch, which not every program on Ray needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray

from kapell.decorators import nbytes_of
from kapell.protocol import DataProtoFuture
from kapell.workergroup import CallRecord

from .answers import Answers
from .borrowing import borrowing
from .pending import SharedCall
from .shipping import shipped
from .storing import put_value

__all__ = ["RayPendingBatch", "RayStore"]

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class RayStore:
    """Ray's object store, as the `DataProtoFuture` of a call uses it. What it gives is private and writable.

    Where what is made of the values is a copy in any case (``copied_anyway``), they are read where they lie.
    """

    answers: Answers
    copied_anyway: bool
    record: CallRecord | None = field(default=None, compare=False, repr=False)
    """Where the controller notes what it fetches; it stays there when the store travels."""

    def put(self, value: Any) -> ray.ObjectRef:
        """Keep a value and give a reference to it."""
        return put_value(shipped(value), "a value")

    def get(self, refs: Sequence[ray.ObjectRef], *, timeout: float | None = None) -> list[Any]:
        """Give the values in order; raises as `Answers.get` does."""
        with borrowing() if self.copied_anyway else nullcontext():
            values = self.answers.get(refs, timeout)
        if self.record is not None:
            self.record.fetched_apart += sum(map(nbytes_of, values))
        return values

    def wait(
        self, refs: Sequence[ray.ObjectRef], *, timeout: float | None = None
    ) -> tuple[list[ray.ObjectRef], list[ray.ObjectRef]]:
        """Wait until all are there or the time is over; give those that are there and those that are not."""
        return self.answers.wait(refs, timeout)

    def __reduce__(self) -> tuple[type[RayStore], tuple[Answers, bool]]:
        return RayStore, (self.answers, self.copied_anyway)


class RayPendingBatch(SharedCall[ResultT], DataProtoFuture):
    """A call under way that makes a batch. Cutting it is bookkeeping; each part fetches its rows where it is used."""

    def get(self, timeout: float | None = None, *, columns: Sequence[str] | None = None) -> Any:
        """The joined batch, or only the named columns of it; see `PendingCall.get` for what it raises."""
        return SharedCall.get(self, timeout) if columns is None else self._future().get(timeout, columns=columns)

    @property
    def futures(self) -> tuple[ray.ObjectRef, ...]:
        """References to the collected ranks' results."""
        return tuple(self._answers.givers)

    @property
    def num_rows(self) -> int | None:
        """None: a method may return other rows than it was given."""
        return None

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Cut into exactly ``chunks`` parts, which are cut where they are used."""
        return self._future(cut=True).chunk(chunks)

    def _future(self, *, cut: bool = False) -> DataProtoFuture:
        # One result alone is not joined: only what is cut out of it is a copy.
        store = RayStore(self._answers, cut or len(self.futures) > 1, self._record)
        return DataProtoFuture(self.futures, store, collect_fn=self._plan.collector)

    def __repr__(self) -> str:
        return f"RayPendingBatch({self.label}, {len(self.futures)} shards)"
