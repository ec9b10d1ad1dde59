"""The calls of one method in one mode: what they have in common is found once, the rest per call."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from kapell.decorators import calls, columns
from kapell.decorators.arguments import ArgumentLayout, Slot, batches_in, common_columns
from kapell.decorators.collect import Collector
from kapell.decorators.forms import CallForms
from kapell.decorators.futures import is_future
from kapell.decorators.markers import Replicate
from kapell.decorators.mesh import GroupShape, MeshLayout
from kapell.decorators.modes import Arguments, Dispatch, Execute, Reduction
from kapell.decorators.plan import DispatchPlan, PlannedArgument
from kapell.decorators.rowplan import plan_rows
from kapell.decorators.rows import RowLayout, Shards
from kapell.decorators.spec import MethodSpec, Uneven
from kapell.decorators.splitter import Splitter
from kapell.decorators.splitting import splitter_of

__all__ = ["CallLayout"]


class CallLayout:
    """The calls of one method in one mode over one group."""

    def __init__(
        self, method: str, spec: MethodSpec, mode: Dispatch, shape: GroupShape, signature: inspect.Signature | None
    ) -> None:
        self.method = method
        self.name = f"{shape.role}.{method}" if shape.role else method
        self.spec = spec
        self.mode = mode
        self.shape = shape
        self.signature = signature
        if mode.arguments is Arguments.FORBIDDEN:
            raise NotImplementedError(f"{self.name} is labelled {mode}: call it on the worker itself, not its group")
        self.alone = spec.execute_mode is Execute.RANK_ZERO or mode.arguments is Arguments.RANK_ZERO
        self.splits_rows = mode.arguments in (Arguments.ROWS, Arguments.FUNCTION_AND_ROWS)
        self.per_worker = mode.arguments is Arguments.PER_WORKER
        self.ranks = (0,) if self.alone else tuple(range(shape.world_size))
        self.lay = ArgumentLayout(self.name, mode.name, shape.world_size, self.ranks, spec.reads)
        annotated = mode.arguments not in (Arguments.PER_WORKER, Arguments.CUSTOM)
        self._forms = CallForms(self.name, signature, types=annotated)
        # Where nothing but the number of rows decides how rows are cut.
        self.cuts_evenly = mode.arguments is Arguments.ROWS and not self.alone and not spec.reads
        self.cuts_evenly &= spec.balance_by is None and spec.group_by is None and spec.padding_argument is None
        self._last: tuple[Any, Any, Any, DispatchPlan] | None = None

    def plan(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DispatchPlan:
        """Plan one call."""
        lay, padding_argument = self.lay, self.spec.padding_argument
        slots, splitters = self._forms.checked(args, kwargs)
        values = [*args, *kwargs.values()]
        if splitters is not None and self.cuts_evenly:
            plan = self._plan_even_rows(slots, values, splitters)
            if plan is not None:
                return plan
        if self.signature is not None and padding_argument is not None:
            calls.check_padding_argument(self.name, self.signature, padding_argument, padding_argument in kwargs)
        there = ()
        if splitters is None or self.spec.reads or self.per_worker:
            there = self._check_read(values, per_worker=self.per_worker and not self.alone)
        if self.splits_rows and not self.alone:
            return self._plan_rows(slots, values, there)
        lay_open = lay.entry_per_rank if self.per_worker and not self.alone else lay.whole
        planned = [lay.marked(slot, value) or lay_open(slot, value) for slot, value in zip(slots, values, strict=True)]
        if padding_argument is not None:
            planned.append(PlannedArgument(padding_argument, None, (0,), lay.to_all))
        reduction = Reduction.FIRST if self.alone else self.mode.collect
        return self._finished(planned, reduction, there)

    def plan_custom(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], group: Any) -> DispatchPlan:
        """Plan one call by the functions of a custom mode, which get `group`."""
        assert self.mode.dispatch_fn is not None
        assert self.mode.collect_fn is not None
        laid = self.mode.dispatch_fn(group, *args, **kwargs)
        if not (isinstance(laid, tuple | list) and len(laid) == 2 and isinstance(laid[1], Mapping)):
            raise TypeError(f"{self.name}: the dispatch_fn of {self.mode} must return (args, kwargs), got {laid!r:.80}")
        laid_args, laid_kwargs = tuple(laid[0]), dict(laid[1])
        slots, values = self._forms.checked(laid_args, laid_kwargs).slots, [*laid_args, *laid_kwargs.values()]
        there = self._check_read(values, per_worker=not self.alone)
        lay_one = self.lay.whole if self.alone else self.lay.entry_per_rank
        planned = [lay_one(slot, value) for slot, value in zip(slots, values, strict=True)]
        collect_fn, alone = self.mode.collect_fn, self.alone

        def finish(outputs: list[Any]) -> Any:
            return collect_fn(group, outputs[0] if alone else outputs)

        rows, padding = _rows_of_custom(planned, len(self.ranks))
        collector = self._collector(self.ranks, Reduction.LIST, there, rows=rows, padding=padding, finish=finish)
        return self._plan_of(self.ranks, planned, collector, there, rows=rows, padding_rows=padding)

    def _check_read(self, values: Sequence[Any], *, per_worker: bool) -> tuple[str, ...]:
        """The columns that the caller's batches have, when they have those that the method reads."""
        there: dict[str, None] = {}
        any_batch = any_unknown = False
        reads = self.spec.reads
        for value in values:
            names = common_columns(batches_in(value, per_worker=per_worker))
            if names is not None:
                any_batch = True
                there.update(names)
            elif reads and is_future(value):
                any_unknown = True
        if reads and any_batch and not any_unknown:
            columns.check_read(self.name, reads, set(there), self.shape.writers)
        return tuple(there)

    def _plan_even_rows(
        self, slots: Sequence[Slot], values: Sequence[Any], splitters: Sequence[Splitter | None]
    ) -> DispatchPlan | None:
        """The plan of a call that is cut by the number of its rows alone; None when there is more to look at."""
        mesh_name = self.mode.mesh_name
        mesh = MeshLayout.flat(self.shape.world_size) if mesh_name is None else self.shape.mesh(mesh_name)
        num_shards = mesh.dp_size
        layout = None
        planned = []
        for slot, value, splitter in zip(slots, values, splitters, strict=True):
            if splitter is None:
                planned.append(slot.planned((value,), self.lay.to_all))
                continue
            if layout is None:
                num_rows = splitter.length(value)
                layout = RowLayout.even(num_rows, num_shards)
                if num_rows % num_shards and self.spec.uneven is not Uneven.SHARDS:
                    return None
            elif splitter.length(value) != layout.num_rows:
                return None
            planned.append(slot.planned(Shards(value, splitter, layout), mesh.dp_ranks))
        return self._finished(planned, self.mode.collect, (), layout, mesh)

    def _plan_rows(self, slots: Sequence[Slot], values: Sequence[Any], there: tuple[str, ...]) -> DispatchPlan:
        mesh_name, lay = self.mode.mesh_name, self.lay
        mesh = MeshLayout.flat(self.shape.world_size) if mesh_name is None else self.shape.mesh(mesh_name)
        if self.mode.arguments is Arguments.FUNCTION_AND_ROWS:
            self._check_function(slots, values)
        planned = [lay.marked(slot, value) for slot, value in zip(slots, values, strict=True)]
        open_places = [place for place, marked in enumerate(planned) if marked is None]
        rows = plan_rows(
            self.name,
            self.spec,
            [(slots[place].label, values[place]) for place in open_places],
            num_shards=mesh.dp_size,
            world_size=self.shape.world_size,
            kept=lay.kept,
        )
        for place, parts in zip(open_places, rows.values, strict=True):
            planned[place] = slots[place].planned(parts, lay.to_all if len(parts) == 1 else mesh.dp_ranks)
        arguments = [argument for argument in planned if argument is not None]
        if rows.padding_argument is not None:
            arguments.append(PlannedArgument(self.spec.padding_argument, None, rows.padding_argument, mesh.dp_ranks))
        return self._finished(arguments, self.mode.collect, there, rows.layout, mesh)

    def _check_function(self, slots: Sequence[Slot], given: Sequence[Any]) -> None:
        values = [value.value if isinstance(value, Replicate) else value for value in given]
        first = values[0] if slots and slots[0].position == 0 else None
        if callable(first) or (first is None and any(map(callable, values))):
            return
        raise TypeError(f"{self.name}: {self.mode} takes a function as first argument, got {type(first).__name__}")

    def _finished(
        self,
        planned: Sequence[PlannedArgument],
        reduction: Reduction,
        there: tuple[str, ...],
        layout: RowLayout | None = None,
        mesh: MeshLayout | None = None,
    ) -> DispatchPlan:
        last = self._last
        if last is not None and last[0] is layout and last[1] is mesh and last[2] == there:
            return last[3].with_arguments(tuple(planned))
        collected: dict[str, Any] = {}
        shards: dict[str, Any] = {}
        if layout is not None and mesh is not None:
            padding = layout.padding
            shards["rows"] = tuple(layout.sizes[shard] for shard in mesh.dp_ranks)
            shards["padding_rows"] = tuple(padding[shard] for shard in mesh.dp_ranks)
            shards["row_layout"], shards["shards"] = layout, mesh.dp_ranks
            # Collected ranks come in data-parallel order, one a shard.
            collected = {"rows": layout.sizes, "padding": padding, "order": layout.order}
        collect_ranks = self.ranks if mesh is None else mesh.collect_ranks
        collector = self._collector(collect_ranks, self.spec.collect or reduction, there, **collected)
        plan = self._plan_of(collect_ranks, planned, collector, there, **shards)
        if layout is None or layout.order is None:
            self._last = (layout, mesh, there, plan.with_arguments(()))
        return plan

    def _collector(
        self, ranks: tuple[int, ...], reduction: Reduction, there: tuple[str, ...], **options: Any
    ) -> Collector:
        writes = self.spec.writes if self.spec.strict else None
        return Collector(self.name, ranks, reduction, writes=writes, sent=self._sent(there), **options)

    def _sent(self, there: tuple[str, ...]) -> tuple[str, ...]:
        """The columns that travel, of those that the caller's batches have."""
        reads = self.spec.reads
        return tuple(name for name in there if name in reads) if reads else there

    def _plan_of(
        self,
        collect_ranks: tuple[int, ...],
        planned: Sequence[PlannedArgument],
        collector: Collector,
        there: tuple[str, ...],
        *,
        rows: tuple[int, ...] | None = None,
        padding_rows: tuple[int, ...] | None = None,
        **fields: Any,
    ) -> DispatchPlan:
        none = self.lay.to_all
        return DispatchPlan(
            method=self.method,
            role=self.shape.role,
            mode=self.mode.name,
            world_size=self.shape.world_size,
            ranks=self.ranks,
            collect_ranks=collect_ranks,
            arguments=tuple(planned),
            collector=collector,
            columns=self._sent(there),
            rows=rows or none,
            padding_rows=padding_rows or none,
            **fields,
        )


def _rows_of_custom(planned: list[PlannedArgument], num_ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows and marked padding of each rank, as far as a custom mode's batches tell them."""
    rows, padding = [0] * num_ranks, [0] * num_ranks
    for argument in planned:
        for slot, which in enumerate(argument.index):
            splitter = splitter_of(argument.values[which])
            if splitter is None or splitter.columns is None:
                continue
            length, marked = splitter.length(argument.values[which]), splitter.marked(argument.values[which])
            rows[slot], padding[slot] = max(rows[slot], length - marked), max(padding[slot], marked)
    return tuple(rows), tuple(padding)
