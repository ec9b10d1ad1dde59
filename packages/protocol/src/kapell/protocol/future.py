"""`DataProtoFuture`: a batch that is still being made, or made elsewhere, known by references to its shards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol, runtime_checkable

from tensordict import TensorDictBase

from kapell.protocol.indexing import balanced_bounds
from kapell.protocol.naming import only
from kapell.protocol.store import Store, reference_key
from kapell.protocol.tensordict_utils import concat_tensordict, get_keys

__all__ = ["CollectsParts", "DataProtoFuture"]


@runtime_checkable
class CollectsParts(Protocol):
    """A ``collect_fn`` that can also join only the rows of one part of what it would give."""

    def __call__(self, parts: list[Any], /) -> Any:
        """Join the shards."""
        ...

    def part(self, parts: list[Any], index: int, count: int, /) -> Any:
        """Give the rows of one of ``count`` parts, whose sizes differ by at most one."""
        ...


@dataclass(frozen=True)
class _Piece:
    """Rows ``start`` to ``stop`` of a stored batch; ``stop`` is None for one of unknown size, taken whole."""

    ref: Any
    start: int
    stop: int | None


class DataProtoFuture:
    """Rows of shards that lie in a store. Cutting and joining it is bookkeeping; `get` brings the rows here.

    With the shards' row counts known, a cut refers only to the shards that it overlaps, and only these are fetched.
    ``collect_fn`` joins the fetched shards where joining them one after the other would be wrong (padding, order);
    then every shard is fetched, and if it has a method ``part`` (see `CollectsParts`), only a cut's rows are joined.

    >>> from kapell.protocol import DataProto, MemoryStore
    >>> store = MemoryStore()
    >>> refs = [store.put(DataProto.from_dict(non_tensors={"n": rows})) for rows in ([0, 1], [2, 3])]
    >>> future = DataProtoFuture(refs, store, rows=[2, 2])
    >>> [part.get().non_tensor_batch["n"].tolist() for part in future.chunk(3)]
    [[0, 1], [2], [3]]
    """

    __kapell_future__ = True

    def __init__(
        self,
        futures: Iterable[Any],
        store: Store,
        *,
        rows: Sequence[int] | None = None,
        collect_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        futures = list(futures)
        if rows is not None and len(rows) != len(futures):
            raise ValueError(f"there are {len(futures)} shards but row counts for {len(rows)}")
        counts: Sequence[int | None] = [None] * len(futures) if rows is None else rows
        pieces = (_Piece(ref, 0, count) for ref, count in zip(futures, counts, strict=True))
        self._set(tuple(pieces), store, collect_fn, ())

    @staticmethod
    def concat(data: Sequence[DataProtoFuture]) -> DataProtoFuture:
        """Join futures of one store, row after row."""
        if not data:
            raise ValueError("there is nothing to concatenate: got no futures")
        for number, part in enumerate(data):
            if part._collect is not None or part._cuts:
                raise ValueError(f"part {number} can be joined only when it is there; get() it first")
            if part._store is not data[0]._store and part._store != data[0]._store:
                raise ValueError(f"part {number} lies in another store than part 0")
        return DataProtoFuture._of(tuple(piece for part in data for piece in part._pieces), data[0]._store, None, ())

    @property
    def futures(self) -> tuple[Any, ...]:
        """References to everything that `get` would fetch, each once."""
        return tuple({reference_key(piece.ref): piece.ref for piece in self._pieces}.values())

    @property
    def num_rows(self) -> int | None:
        """Rows, or None as long as nobody knows."""
        if self._collect is not None or self._cuts or any(piece.stop is None for piece in self._pieces):
            return None
        return sum(_length(piece) for piece in self._pieces)

    def __len__(self) -> int:
        if self.num_rows is None:
            raise TypeError("the rows of this future are not known before it is there; get() it, or give rows=")
        return self.num_rows

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Cut into exactly ``chunks`` pieces whose sizes differ by at most one, as `DataProto.chunk` does."""
        if chunks < 1:
            raise ValueError(f"cannot cut a future into {chunks} pieces; ask for at least 1")
        rows = self.num_rows
        if rows is None:
            return [
                self._of(self._pieces, self._store, self._collect, (*self._cuts, (part, chunks)))
                for part in range(chunks)
            ]
        return [self.slice(start, stop) for start, stop in pairwise(balanced_bounds(rows, chunks))]

    def slice(self, start: int, end: int) -> DataProtoFuture:
        """Give rows ``start`` to ``end`` of a future whose rows are known."""
        first, last, _ = slice(start, end).indices(len(self))
        begins = accumulate((_length(piece) for piece in self._pieces), initial=0)
        cut = [_overlap(piece, first - begin, last - begin) for piece, begin in zip(self._pieces, begins, strict=False)]
        # Without any row a piece stays, empty, to say which columns there are.
        kept = [piece for piece in cut if _length(piece)] or cut[:1]
        return self._of(tuple(kept), self._store, None, ())

    def get(self, timeout: float | None = None, *, columns: Sequence[str] | None = None) -> Any:
        """Fetch the rows, with all columns or those named; TimeoutError when they are not there in time (seconds)."""
        references = self.futures
        values = self._store.get(references, timeout=timeout)
        by_reference = dict(zip(map(reference_key, references), values, strict=True))
        parts = [_rows(by_reference[reference_key(piece.ref)], piece) for piece in self._pieces]
        if columns is not None:
            parts = [_select(part, columns) for part in parts]
        cuts = list(self._cuts)
        if cuts and isinstance(self._collect, CollectsParts):
            whole = self._collect.part(parts, *cuts.pop(0))
        else:
            whole = _concat(parts) if self._collect is None else self._collect(parts)
        for part, chunks in cuts:
            # A slice, not chunk: lists have none, and torch's own cuts at other rows.
            bounds = list(balanced_bounds(len(whole), chunks))
            whole = whole[bounds[part] : bounds[part + 1]]
        return whole

    def done(self) -> bool:
        """Say whether all shards are there."""
        return not self._store.wait(self.futures, timeout=0)[1]

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.get).__await__()

    def __repr__(self) -> str:
        rows = "unknown rows" if self.num_rows is None else f"{self.num_rows} rows"
        return f"DataProtoFuture({rows} of {len(self._pieces)} shards)"

    def _set(self, pieces: tuple[_Piece, ...], store: Store, collect: Any, cuts: tuple[tuple[int, int], ...]) -> None:
        self._store = store  # pickled first: a store that is gone says so before its references are looked at
        self._pieces, self._collect, self._cuts = pieces, collect, cuts

    @classmethod
    def _of(cls, *parts: Any) -> DataProtoFuture:
        future = cls.__new__(cls)
        future._set(*parts)
        return future


def _length(piece: _Piece) -> int:
    assert piece.stop is not None
    return piece.stop - piece.start


def _overlap(piece: _Piece, first: int, last: int) -> _Piece:
    start = min(max(first, 0), _length(piece))
    stop = min(max(last, start), _length(piece))
    return replace(piece, start=piece.start + start, stop=piece.start + stop)


def _rows(batch: Any, piece: _Piece) -> Any:
    if piece.stop is None or (piece.start == 0 and piece.stop == len(batch)):
        return batch
    if piece.stop > len(batch):
        raise ValueError(f"a shard of {len(batch)} rows was said to have {piece.stop} or more")
    return batch[piece.start : piece.stop]


def _select(batch: Any, columns: Sequence[str]) -> Any:
    return get_keys(batch, columns) if isinstance(batch, TensorDictBase) else only(batch, columns)


def _concat(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return concat_tensordict(parts) if isinstance(parts[0], TensorDictBase) else type(parts[0]).concat(parts)
