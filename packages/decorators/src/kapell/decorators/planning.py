"""Planning a call: a pure function from a label, the shape of a group and the arguments to a `DispatchPlan`."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kapell.decorators import calls, columns
from kapell.decorators.arguments import ArgumentLayout, Slot, batches_in, common_columns
from kapell.decorators.collect import Collector
from kapell.decorators.futures import is_future
from kapell.decorators.markers import Replicate
from kapell.decorators.mesh import GroupShape, MeshLayout
from kapell.decorators.modes import Arguments, Dispatch, Execute, Reduction, resolve
from kapell.decorators.plan import DispatchPlan, PlannedArgument
from kapell.decorators.rowplan import plan_rows
from kapell.decorators.rows import RowLayout
from kapell.decorators.spec import MethodSpec
from kapell.decorators.splitting import splitter_of

__all__ = ["make_plan"]

_Slots = list[tuple[Slot, Any]]


def make_plan(
    method: str,
    spec: MethodSpec,
    shape: GroupShape,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    signature: inspect.Signature | None = None,
    group: Any = None,
) -> DispatchPlan:
    """Plan one call of `method` over a group of the given shape. Nothing is sent, and no argument is changed.

    `signature` (see `signature_of`) lets wrong calls be refused here; `group` is only handed to the functions of a
    custom mode, which get `shape` without it. Costs time and memory per rank, not per row: shards are cut when the
    plan's arguments are read.

    >>> spec = MethodSpec(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    >>> plan = make_plan("double", spec, GroupShape(2), ([1, 2, 3],))
    >>> plan.rows, plan.call_for(1), plan.collect([[2, 4], [6]])
    ((2, 1), (([3],), {}), [2, 4, 6])
    """
    kwargs = dict(kwargs or {})
    name = f"{shape.role}.{method}" if shape.role else method
    mode = resolve(spec.dispatch_mode)
    if mode.arguments is Arguments.FORBIDDEN:
        raise NotImplementedError(f"{name} is labelled {mode}: call it on the worker itself, not its group")
    call = _Call(method, name, spec, mode, shape, signature)
    if mode.arguments is Arguments.CUSTOM:
        return call.plan_custom(args, kwargs, shape if group is None else group)
    if signature is not None:
        calls.check_call(name, signature, args, kwargs, types=mode.arguments is not Arguments.PER_WORKER)
        if spec.padding_argument is not None:
            calls.check_padding_argument(name, signature, spec.padding_argument, spec.padding_argument in kwargs)
    return call.plan(args, kwargs)


@dataclass(frozen=True)
class _Call:
    """What all steps of planning one call need."""

    method: str
    name: str
    spec: MethodSpec
    mode: Dispatch
    shape: GroupShape
    signature: inspect.Signature | None

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DispatchPlan:
        slots = self._slots(args, kwargs)
        per_worker = self.mode.arguments is Arguments.PER_WORKER and not self._alone()
        there = self._check_read(slots, per_worker=per_worker)
        lay = self._argument_layout()
        if self._alone():
            planned = [lay.marked(slot, value) or lay.whole(slot, value) for slot, value in slots]
            return self._finish(lay.ranks, lay.ranks, planned, Reduction.FIRST, there)
        if self.mode.arguments in (Arguments.ROWS, Arguments.FUNCTION_AND_ROWS):
            return self._plan_rows(lay, slots, there)
        lay_open = lay.entry_per_rank if self.mode.arguments is Arguments.PER_WORKER else lay.whole
        planned = [lay.marked(slot, value) or lay_open(slot, value) for slot, value in slots]
        return self._finish(lay.ranks, lay.ranks, planned, self.mode.collect, there)

    def plan_custom(self, args: tuple[Any, ...], kwargs: dict[str, Any], group: Any) -> DispatchPlan:
        assert self.mode.dispatch_fn is not None
        assert self.mode.collect_fn is not None
        laid = self.mode.dispatch_fn(group, *args, **kwargs)
        if not (isinstance(laid, tuple | list) and len(laid) == 2 and isinstance(laid[1], Mapping)):
            raise TypeError(f"{self.name}: the dispatch_fn of {self.mode} must return (args, kwargs), got {laid!r:.80}")
        laid_args, laid_kwargs = tuple(laid[0]), dict(laid[1])
        if self.signature is not None:
            calls.check_call(self.name, self.signature, laid_args, laid_kwargs, types=False)
        slots = self._slots(laid_args, laid_kwargs)
        there = self._check_read(slots, per_worker=not self._alone())
        lay = self._argument_layout()
        lay_one = lay.whole if self._alone() else lay.entry_per_rank
        planned = [lay_one(slot, value) for slot, value in slots]
        collect_fn, alone = self.mode.collect_fn, self._alone()

        def finish(outputs: list[Any]) -> Any:
            return collect_fn(group, outputs[0] if alone else outputs)

        rows, padding = _rows_of_custom(planned, len(lay.ranks))
        collector = self._collector(lay.ranks, Reduction.LIST, there, rows=rows, padding=padding, finish=finish)
        return self._plan_of(lay.ranks, lay.ranks, planned, collector, there, rows=rows, padding_rows=padding)

    def _alone(self) -> bool:
        return self.spec.execute_mode is Execute.RANK_ZERO or self.mode.arguments is Arguments.RANK_ZERO

    def _argument_layout(self) -> ArgumentLayout:
        world_size = self.shape.world_size
        ranks = (0,) if self._alone() else tuple(range(world_size))
        return ArgumentLayout(self.name, self.mode.name, world_size, ranks, self.spec.reads)

    def _slots(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Slots:
        label = calls.labels(self.signature, len(args))
        slots = [(Slot(None, index, label(index)), value) for index, value in enumerate(args)]
        return slots + [(Slot(name, None, name), value) for name, value in kwargs.items()]

    def _check_read(self, slots: _Slots, *, per_worker: bool) -> tuple[str, ...]:
        """The columns that the caller's batches have, when they have those that the method reads."""
        there: dict[str, None] = {}
        any_batch = any_unknown = False
        for _, value in slots:
            names = common_columns(batches_in(value, per_worker=per_worker))
            if names is not None:
                any_batch = True
                there.update(names)
            elif is_future(value):
                any_unknown = True
        if self.spec.reads and any_batch and not any_unknown:
            columns.check_read(self.name, self.spec.reads, set(there), self.shape.writers)
        return tuple(there)

    def _plan_rows(self, lay: ArgumentLayout, slots: _Slots, there: tuple[str, ...]) -> DispatchPlan:
        mesh_name = self.mode.mesh_name
        mesh = self.shape.mesh(mesh_name) if mesh_name is not None else MeshLayout.flat(self.shape.world_size)
        if self.mode.arguments is Arguments.FUNCTION_AND_ROWS:
            self._check_function(slots)
        planned = {index: done for index, item in enumerate(slots) if (done := lay.marked(*item)) is not None}
        open_slots = [(index, *item) for index, item in enumerate(slots) if index not in planned]
        rows = plan_rows(
            self.name,
            self.spec,
            [(slot.label, value) for _, slot, value in open_slots],
            num_shards=mesh.dp_size,
            world_size=self.shape.world_size,
            kept=lay.kept,
        )
        for (index, slot, _), values in zip(open_slots, rows.values, strict=True):
            one_for_all = len(values) == 1
            planned[index] = slot.planned(values, (0,) * len(lay.ranks) if one_for_all else mesh.dp_ranks)
        arguments = [planned[index] for index in range(len(slots))]
        if rows.padding_argument is not None:
            arguments.append(PlannedArgument(self.spec.padding_argument, None, rows.padding_argument, mesh.dp_ranks))
        return self._finish(lay.ranks, mesh.collect_ranks, arguments, self.mode.collect, there, rows.layout, mesh)

    def _check_function(self, slots: _Slots) -> None:
        values = [value.value if isinstance(value, Replicate) else value for _, value in slots]
        first = values[0] if slots and slots[0][0].position == 0 else None
        if callable(first) or (first is None and any(map(callable, values))):
            return
        raise TypeError(f"{self.name}: {self.mode} takes a function as first argument, got {type(first).__name__}")

    def _finish(
        self,
        ranks: tuple[int, ...],
        collect_ranks: tuple[int, ...],
        planned: Sequence[PlannedArgument],
        reduction: Reduction,
        there: tuple[str, ...],
        layout: RowLayout | None = None,
        mesh: MeshLayout | None = None,
    ) -> DispatchPlan:
        collected: dict[str, Any] = {}
        shards: dict[str, Any] = {}
        if layout is not None and mesh is not None:
            padding = layout.padding
            shards["rows"] = tuple(layout.sizes[shard] for shard in mesh.dp_ranks)
            shards["padding_rows"] = tuple(padding[shard] for shard in mesh.dp_ranks)
            shards["row_layout"], shards["shards"] = layout, mesh.dp_ranks
            # Collected ranks come in data-parallel order, one a shard.
            collected = {"rows": layout.sizes, "padding": padding, "order": layout.order}
        collector = self._collector(collect_ranks, self.spec.collect or reduction, there, **collected)
        return self._plan_of(ranks, collect_ranks, planned, collector, there, **shards)

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
        ranks: tuple[int, ...],
        collect_ranks: tuple[int, ...],
        planned: Sequence[PlannedArgument],
        collector: Collector,
        there: tuple[str, ...],
        *,
        rows: tuple[int, ...] | None = None,
        padding_rows: tuple[int, ...] | None = None,
        **fields: Any,
    ) -> DispatchPlan:
        none = (0,) * len(ranks)
        return DispatchPlan(
            method=self.method,
            role=self.shape.role,
            mode=self.mode.name,
            world_size=self.shape.world_size,
            ranks=ranks,
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
