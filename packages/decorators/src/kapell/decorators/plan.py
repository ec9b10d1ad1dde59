"""A planned call: who runs, what each rank is sent, whose results are fetched, and how they become one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kapell.decorators.arguments import PlannedArgument
from kapell.decorators.collect import Collector
from kapell.decorators.rows import RowLayout
from kapell.decorators.table import format_table

__all__ = ["DispatchPlan"]


@dataclass(frozen=True, eq=False, kw_only=True)
class DispatchPlan:
    """All of a call that can be decided before anything is sent. Made by `make_plan`; `print(plan)` shows a table."""

    method: str
    """Name of the method."""
    role: str
    """Name of the group; may be empty."""
    mode: str
    """Name of the dispatch mode."""
    world_size: int
    """Ranks of the group."""
    ranks: tuple[int, ...]
    """The ranks that run the method."""
    collect_ranks: tuple[int, ...]
    """The ranks whose results are fetched, in the order in which they are joined."""
    arguments: tuple[PlannedArgument, ...]
    """What is sent, positional arguments first."""
    rows: tuple[int, ...]
    """Rows of the caller that each running rank gets, padding not counted; zeros where nothing is split, or where
    the number isn't known yet (a future)."""
    padding_rows: tuple[int, ...]
    """Padding rows at the end of each running rank's shard."""
    columns: tuple[str, ...] = ()
    """Columns that are sent, of batches with named columns."""
    row_layout: RowLayout | None = None
    """Which rows are in which shard; None where nothing is split."""
    shards: Sequence[int] = ()
    """The shard of each running rank; empty where nothing is split."""
    collector: Collector
    """What `collect` does, once the number of results is checked; can be pickled where no custom mode is."""

    def with_arguments(self, arguments: tuple[PlannedArgument, ...]) -> "DispatchPlan":
        """The same plan for other arguments, laid out alike."""
        plan = object.__new__(type(self))
        plan.__dict__.update(self.__dict__, arguments=arguments)
        return plan

    def call_for(self, rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of one running rank."""
        slot = self._slot(rank)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in self.arguments:
            value = argument.values[argument.index[slot]]
            if argument.name is None:
                args.append(value)
            else:
                kwargs[argument.name] = value
        return tuple(args), kwargs

    def rows_of(self, rank: int) -> Sequence[int]:
        """The caller's rows that a running rank gets, in the order in which it gets them, padding not counted."""
        if self.row_layout is None:
            return range(0)
        return self.row_layout.positions(self.shards[self._slot(rank)])

    def collect(self, outputs: Sequence[Any]) -> Any:
        """The call's result from the results of `collect_ranks`, in that order.

        Drops padded rows, joins or reduces, then restores the caller's order.
        """
        if len(outputs) != len(self.collect_ranks):
            raise ValueError(f"{self.method}: collects {len(self.collect_ranks)} results, got {len(outputs)}")
        return self.collector(list(outputs))

    def _slot(self, rank: int) -> int:
        # Ranks are 0, 1, 2, ... or rank 0 alone: no search through thousands of them.
        if not 0 <= rank < len(self.ranks):
            raise ValueError(
                f"{self.method}: rank {rank} does not run; {len(self.ranks)} of {self.world_size} ranks do"
            )
        return rank

    def __str__(self) -> str:
        num_rows = self.row_layout.num_rows if self.row_layout is not None else 0
        name = f"{self.role}.{self.method}" if self.role else self.method
        title = f"{name}: {self.mode}, {num_rows} rows, {len(self.ranks)} of {self.world_size} ranks run"
        return format_table(title, self.ranks, self.rows, self.padding_rows, self.columns, self.arguments)
