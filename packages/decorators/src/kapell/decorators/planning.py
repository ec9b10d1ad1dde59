"""Planning a call: a pure function from a label, the shape of a group and the arguments to a `DispatchPlan`."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kapell.decorators import calls, columns
from kapell.decorators.collect import Collector, CustomCollector
from kapell.decorators.markers import PerWorker, Replicate
from kapell.decorators.mesh import GroupShape, MeshLayout
from kapell.decorators.modes import Arguments, Dispatch, Execute, Reduction, resolve
from kapell.decorators.plan import DispatchPlan, PlannedArgument
from kapell.decorators.rowplan import RowsPlan, plan_rows
from kapell.decorators.spec import MethodSpec
from kapell.decorators.splitting import splitter_of

__all__ = ["make_plan"]


@dataclass(frozen=True)
class Slot:
    """Where an argument stands in the call."""

    name: str | None
    position: int | None
    label: str


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
        raise NotImplementedError(
            f"{name} is labelled {mode}: it is called on the worker itself, not through its group"
        )
    if signature is not None and mode.arguments is not Arguments.CUSTOM:
        calls.check_call(name, signature, args, kwargs)
        if mode.arguments is not Arguments.PER_WORKER:
            calls.check_types(name, signature, args, kwargs)
    call = _Call(name, spec, mode, shape, signature, group)
    return call.plan(args, kwargs)


@dataclass(frozen=True)
class _Call:
    """What all steps of planning one call need."""

    name: str
    spec: MethodSpec
    mode: Dispatch
    shape: GroupShape
    signature: inspect.Signature | None
    group: Any

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DispatchPlan:
        if self.mode.arguments is Arguments.CUSTOM:
            return self._custom(args, kwargs)
        slots = self._slots(args, kwargs)
        sent = self._check_read(slots)
        if self.spec.execute_mode is Execute.RANK_ZERO or self.mode.arguments is Arguments.RANK_ZERO:
            planned = [self._marked(slot, value) or self._whole(slot, value) for slot, value in slots]
            return self._finish((0,), (0,), planned, Reduction.FIRST, None, sent)
        ranks = tuple(range(self.shape.world_size))
        if self.mode.arguments in (Arguments.ROWS, Arguments.FUNCTION_AND_ROWS):
            return self._rows(ranks, slots, sent)
        lay = self._entry_per_rank if self.mode.arguments is Arguments.PER_WORKER else self._whole
        planned = [self._marked(slot, value) or lay(slot, value) for slot, value in slots]
        return self._finish(ranks, ranks, planned, self.mode.collect, None, sent)

    def _slots(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Slot, Any]]:
        label = calls.labels(self.signature, len(args))
        slots = [(Slot(None, index, label(index)), value) for index, value in enumerate(args)]
        return slots + [(Slot(name, None, name), value) for name, value in kwargs.items()]

    def _check_read(self, slots: list[tuple[Slot, Any]]) -> tuple[str, ...]:
        """The columns that the caller's batches have, when they have those that the method reads."""
        found = [columns.columns_of(_unwrapped(value)) for _, value in slots]
        there = tuple(dict.fromkeys(name for names in found for name in names or ()))
        if self.spec.reads and any(names is not None for names in found):
            columns.check_read(self.name, self.spec.reads, set(there), self.shape.writers)
        return there

    def _kept(self, value: Any) -> Any:
        """The value with only the columns that are read."""
        return columns.only(value, self.spec.reads) if self.spec.reads else value

    def _rows(self, ranks: tuple[int, ...], slots: list[tuple[Slot, Any]], sent: tuple[str, ...]) -> DispatchPlan:
        layout = self._layout()
        if self.mode.arguments is Arguments.FUNCTION_AND_ROWS:
            self._check_function(slots)
        marked = [(slot, self._marked(slot, value)) for slot, value in slots]
        open_slots = [
            (slot.label, value) for (slot, value), (_, done) in zip(slots, marked, strict=True) if done is None
        ]
        rows = plan_rows(self.name, self.spec, open_slots, layout.dp_size, self.shape.world_size, self._kept)
        shards = iter(rows.values)
        planned = []
        for slot, done in marked:
            if done is not None:
                planned.append(done)
                continue
            values = next(shards)
            index = layout.dp_ranks if len(values) > 1 or layout.dp_size == 1 else (0,) * len(ranks)
            planned.append(PlannedArgument(slot.name, slot.position, values, index, slot.label))
        if rows.padding_argument is not None:
            planned.append(
                PlannedArgument(self.spec.padding_argument, None, rows.padding_argument, layout.dp_ranks, "padding")
            )
        return self._finish(ranks, layout.collect_ranks, planned, self.mode.collect, (rows, layout), sent)

    def _layout(self) -> MeshLayout:
        if self.mode.mesh_name is not None:
            return self.shape.mesh(self.mode.mesh_name)
        return MeshLayout.flat(self.shape.world_size)

    def _check_function(self, slots: list[tuple[Slot, Any]]) -> None:
        first = next((value for slot, value in slots if slot.position == 0), None)
        if callable(first) or (first is None and any(callable(value) for _, value in slots)):
            return
        raise TypeError(f"{self.name}: {self.mode} takes a function as first argument, got {type(first).__name__}")

    def _marked(self, slot: Slot, value: Any) -> PlannedArgument | None:
        """The plan of an argument that says itself where it goes."""
        world = self.shape.world_size
        if isinstance(value, Replicate):
            return self._whole(slot, value.value)
        if isinstance(value, PerWorker):
            if len(value.values) != world:
                raise ValueError(
                    f"{self.name}: argument {slot.label!r} is PerWorker with {len(value.values)} entries; "
                    f"the group has {world} ranks"
                )
            return _distinct(slot, value.values)
        return None

    def _whole(self, slot: Slot, value: Any) -> PlannedArgument:
        return _whole(slot, self._kept(value), self.shape.world_size)

    def _entry_per_rank(self, slot: Slot, value: Any) -> PlannedArgument:
        world = self.shape.world_size
        hint = "wrap it in Replicate(...) to give every rank the whole value"
        if not isinstance(value, list | tuple):
            raise TypeError(
                f"{self.name}: {self.mode} takes for argument {slot.label!r} a list with one entry for each of the "
                f"{world} ranks, got {type(value).__name__}; {hint}"
            )
        if len(value) != world:
            raise ValueError(
                f"{self.name}: {self.mode} takes one entry a rank: argument {slot.label!r} has {len(value)} entries, "
                f"the group {world} ranks; {hint}"
            )
        return _distinct(slot, value)

    def _custom(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DispatchPlan:
        assert self.mode.dispatch_fn is not None
        assert self.mode.collect_fn is not None
        group = self.shape if self.group is None else self.group
        laid = self.mode.dispatch_fn(group, *args, **kwargs)
        if not (isinstance(laid, tuple | list) and len(laid) == 2 and isinstance(laid[1], Mapping)):
            raise TypeError(f"{self.name}: the dispatch_fn of {self.mode} must return (args, kwargs), got {laid!r:.80}")
        slots = self._slots(tuple(laid[0]), dict(laid[1]))
        if self.signature is not None:
            calls.check_call(self.name, self.signature, tuple(laid[0]), laid[1])
        if self.spec.execute_mode is Execute.RANK_ZERO:
            ranks: tuple[int, ...] = (0,)
            planned = [_whole(slot, value, 1) for slot, value in slots]
        else:
            ranks = tuple(range(self.shape.world_size))
            planned = [self._entry_per_rank(slot, value) for slot, value in slots]
        rows, padding = _rows_of_custom(planned, len(ranks))
        single = self.spec.execute_mode is Execute.RANK_ZERO
        collector = CustomCollector(self.name, ranks, self.mode.collect_fn, group, rows, padding, single)
        return DispatchPlan(
            self.name, self.mode.name, self.shape.world_size, ranks, ranks, tuple(planned), rows, padding, (), collector
        )

    def _finish(
        self,
        ranks: tuple[int, ...],
        collect_ranks: tuple[int, ...],
        planned: Sequence[PlannedArgument],
        reduction: Reduction,
        laid: tuple[RowsPlan, MeshLayout] | None,
        sent: tuple[str, ...],
    ) -> DispatchPlan:
        rows = padding = (0,) * len(ranks)
        order, split = None, False
        if laid is not None and laid[0].layout is not None:
            layout, mesh = laid[0].layout, laid[1]
            all_padding = layout.padding
            rows = tuple(layout.sizes[dp_rank] for dp_rank in mesh.dp_ranks)
            padding = tuple(all_padding[dp_rank] for dp_rank in mesh.dp_ranks)
            order, split = layout.order, True
        collector = Collector(
            method=self.name,
            ranks=collect_ranks,
            reduction=self.spec.collect or reduction,
            rows=tuple(rows[rank] for rank in collect_ranks) if split else (),
            padding=tuple(padding[rank] for rank in collect_ranks) if split else (),
            order=order,
            writes=self.spec.writes if self.spec.strict else None,
            sent=sent,
        )
        reads = self.spec.reads
        shown = tuple(name for name in sent if name in reads) if reads else sent
        return DispatchPlan(
            self.name,
            self.mode.name,
            self.shape.world_size,
            ranks,
            collect_ranks,
            tuple(planned),
            rows,
            padding,
            shown,
            collector,
        )


def _whole(slot: Slot, value: Any, num_ranks: int) -> PlannedArgument:
    return PlannedArgument(slot.name, slot.position, (value,), (0,) * num_ranks, slot.label)


def _distinct(slot: Slot, entries: Sequence[Any]) -> PlannedArgument:
    """One entry a rank; an object that occurs several times is one value."""
    places: dict[int, int] = {}
    values: list[Any] = []
    index: list[int] = []
    for entry in entries:
        place = places.setdefault(id(entry), len(values))
        if place == len(values):
            values.append(entry)
        index.append(place)
    return PlannedArgument(slot.name, slot.position, tuple(values), tuple(index), slot.label)


def _unwrapped(value: Any) -> Any:
    return value.value if isinstance(value, Replicate) else value


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
