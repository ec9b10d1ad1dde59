"""From the results of the collected ranks to one: padding dropped, rows joined, the caller's order restored."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

from kapell.decorators.columns import check_written
from kapell.decorators.modes import Reduction
from kapell.decorators.reduce import reduce_outputs
from kapell.decorators.rows import RowLayout, part_of
from kapell.decorators.splitter import Splitter, always
from kapell.decorators.splitting import lookup_splitter, splitter_of

__all__ = ["Collector", "join_outputs"]


@dataclass(frozen=True)
class Collector:
    """How one planned call collects; called with the outputs of `ranks`."""

    method: str
    """Name in messages."""
    ranks: tuple[int, ...]
    """The collected ranks, in joining order."""
    reduction: Reduction
    """What to do with the outputs."""
    rows: tuple[int, ...] = ()
    """Rows of each collected rank, padding not counted; empty where nothing was split."""
    padding: tuple[int, ...] = ()
    """Padding rows of each collected rank."""
    order: Sequence[int] | None = None
    """The caller's row of each joined row; None when they are the same."""
    writes: tuple[str, ...] | None = None
    """Columns that results may hold besides `sent`; None for no check."""
    sent: tuple[str, ...] = ()
    """Columns of the batches that were sent."""
    finish: Callable[[list[Any]], Any] | None = None
    """What a custom mode makes of the outputs, instead of `reduction`."""

    def __call__(self, outputs: list[Any]) -> Any:
        """The result of the call."""
        outputs = self._checked(outputs)
        if self.finish is not None:
            return self.finish(outputs)
        if not self._joins:
            return reduce_outputs(self.method, self.ranks, outputs, self.reduction, self.rows)
        return self._in_order(join_outputs(self.method, self.ranks, outputs))

    def part(self, outputs: list[Any], index: int, count: int) -> Any:
        """Part `index` of `count` of the result, of sizes that differ by at most one row; what has no rows comes whole.

        Where rows are only joined, each output is cut first, so that no other rows are copied; these always are.
        """
        if not self._joins or self.order is not None:
            return _part(self(outputs), index, count)
        outputs = self._checked(outputs)
        pieces = [
            (splitter, output, splitter.length(output))
            for output in outputs
            if (splitter := splitter_of(output)) is not None and splitter.take is not None
        ]
        if len(pieces) < len(outputs):
            return _part(join_outputs(self.method, self.ranks, outputs), index, count)
        start, stop = RowLayout.even(sum(size for _, _, size in pieces), count).span(index)
        if len(pieces) == 1:
            ((splitter, output, _),) = pieces
            assert splitter.take is not None
            return splitter.take(output, range(start, stop))
        cut = []
        for splitter, output, size in pieces:
            cut.append(cut_rows(splitter, output, min(max(start, 0), size), min(max(stop, 0), size)))
            start, stop = start - size, stop - size
        return join_outputs(self.method, self.ranks, cut)

    @property
    def _joins(self) -> bool:
        return self.reduction is Reduction.CONCAT and self.finish is None

    def _checked(self, outputs: list[Any]) -> list[Any]:
        """The outputs without padding, when they hold only what the method says it writes."""
        if self.writes is not None:
            for rank, output in zip(self.ranks, outputs, strict=True):
                check_written(self.method, rank, output, self.writes, self.sent)
        if not any(self.padding):
            return outputs
        return [self._without_padding(slot, output, self._joins) for slot, output in enumerate(outputs)]

    def _without_padding(self, slot: int, output: Any, joins: bool) -> Any:
        splitter = splitter_of(output)
        # Without named columns, and where nothing is joined, a list or tensor is a worker's own result, not rows.
        if splitter is None or not (joins or splitter.columns):
            return output
        if splitter.unpad is not None and splitter.marked(output):
            return splitter.unpad(output)
        rows, padding = self.rows[slot], self.padding[slot]
        length = splitter.length(output)
        if not padding or (length != rows + padding and not joins):
            return output
        if length == rows + padding:
            return cut_rows(splitter, output, 0, rows)
        raise ValueError(
            f"{self.method}: rank {self.ranks[slot]} returned {length} rows for {rows + padding}, {padding} of them "
            "padding; which of its rows to drop cannot be told. Return one row a row, or register with uneven='shards'"
        )

    def _in_order(self, joined: Any) -> Any:
        splitter = splitter_of(joined)
        if self.order is None or splitter is None:
            return joined
        length = splitter.length(joined)
        if length != len(self.order) or splitter.take is None:
            raise ValueError(
                f"{self.method}: the result has {length} rows for {len(self.order)} balanced ones; the caller's order "
                "can only be restored for one row a row"
            )
        inverse = array("q", bytes(8 * length))
        for joined_row, row in enumerate(self.order):
            inverse[row] = joined_row
        return splitter.take(joined, inverse)


def join_outputs(method: str, ranks: Sequence[int], outputs: list[Any]) -> Any:
    """Rows joined in the given order; results without rows (numbers, dicts, all None) as a list.

    Results of different kinds are a TypeError that names the ranks and types.
    """
    types = set(map(type, outputs))
    if len(types) == 1:
        splitter = lookup_splitter(types.pop())
        if splitter is not None and splitter.has_rows is always:
            return outputs[0] if len(outputs) == 1 else splitter.join(outputs)
    splitters = [splitter_of(output) for output in outputs]
    kinds: dict[str, list[int]] = {}
    for rank, output, splitter in zip(ranks, outputs, splitters, strict=True):
        kinds.setdefault(_kind(output, splitter), []).append(rank)
    if len(kinds) > 1:
        found = "; ".join(f"{kind} from {_ranks(members)}" for kind, members in kinds.items())
        raise TypeError(f"{method}: results of different types cannot be joined: {found}")
    if not outputs or splitters[0] is None:
        return outputs
    return outputs[0] if len(outputs) == 1 else splitters[0].join(outputs)


def _part(value: Any, index: int, count: int) -> Any:
    splitter = splitter_of(value)
    return value if splitter is None else part_of(value, splitter, index, count)


def cut_rows(splitter: Splitter, value: Any, start: int, stop: int) -> Any:
    """Rows `start:stop` of a value."""
    if splitter.cut is not None:
        return splitter.cut(value, start, stop)
    if splitter.take is None:
        raise TypeError(f"{splitter.kind} offers chunk only: its padded rows cannot be dropped")
    return splitter.take(value, range(start, stop))


def _kind(output: Any, splitter: Splitter | None) -> str:
    name = type(output).__name__
    if splitter is not None:
        return name
    if isinstance(output, Number):
        return "number"
    return f"{name} without rows" if lookup_splitter(type(output)) is not None else name


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
