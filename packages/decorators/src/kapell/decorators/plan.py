"""A planned call: who runs, what each rank is sent, whose results are fetched, and how they become one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kapell.decorators.table import format_plan

__all__ = ["DispatchPlan", "PlannedArgument"]


@dataclass(frozen=True)
class PlannedArgument:
    """One argument of the call, over all running ranks."""

    name: str | None
    """Keyword, or None for a positional argument."""
    position: int | None
    """Position, or None for a keyword argument."""
    values: Sequence[Any]
    """The distinct values; each is shipped once. May be lazy: a shard is cut when it is asked for, so ask once."""
    index: Sequence[int]
    """For each running rank, which of `values` it receives."""
    label: str = ""
    """What messages and tables call it: the parameter's name where the signature is known."""


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """All of a call that can be decided before anything is sent. Made by `make_plan`; `print(plan)` shows a table."""

    method: str
    """Name of the method, with the group's role in front where it has one."""
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
    columns: tuple[str, ...]
    """Columns that are sent, of batches with named columns."""
    collector: Callable[[list[Any]], Any]
    """What `collect` does, with the number of results already checked."""

    def call_for(self, rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of one running rank."""
        slot = rank if rank < len(self.ranks) and self.ranks[rank] == rank else self.ranks.index(rank)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in self.arguments:
            value = argument.values[argument.index[slot]]
            if argument.name is None:
                args.append(value)
            else:
                kwargs[argument.name] = value
        return tuple(args), kwargs

    def collect(self, outputs: Sequence[Any]) -> Any:
        """The call's result from the results of `collect_ranks`, in that order.

        Drops padded rows, restores the caller's order, then joins or reduces.
        """
        if len(outputs) != len(self.collect_ranks):
            raise ValueError(f"{self.method}: collects {len(self.collect_ranks)} results, got {len(outputs)}")
        return self.collector(list(outputs))

    def __str__(self) -> str:
        return format_plan(self)
