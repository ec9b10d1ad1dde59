"""A step under observation: which stages run, what each needs and makes, and which worker methods it calls."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, cast

from kapell.decorators import PerWorker
from kapell.protocol import DataProto
from kapell.workergroup import WorkerGroup

from .metrics import column_metrics
from .stage import StageSpec, stage_spec_of
from .stages import Stages
from .steps import Step

__all__ = ["ObservedStage", "Observer", "WorkerCall"]


@dataclass(frozen=True)
class WorkerCall:
    """A method of a group that a stage called, with or for columns."""

    role: str
    """The group's name among the roles."""
    worker: str
    """The class of its workers."""
    method: str
    """The method."""
    reads: tuple[str, ...]
    """The columns that travel to the workers: those that the method declares, or else all that it was given."""
    writes: tuple[str, ...]
    """The columns that it declares to make."""


@dataclass
class ObservedStage:
    """A stage that ran, or began to."""

    name: str
    """Its name in ``timing_s/<name>``."""
    method: str
    """The method of `kapell.trainer.stages.Stages`."""
    reads: tuple[str, ...]
    """The columns that it declares to need."""
    writes: tuple[str, ...]
    """The columns that it declares to make."""
    before: tuple[str, ...]
    """The columns it was given."""
    after: tuple[str, ...] | None = None
    """The columns of its result; None where it did not end."""
    calls: list[WorkerCall] = field(default_factory=list)
    """The worker methods it called, each once."""

    @property
    def made(self) -> tuple[str, ...]:
        """The columns that came with it."""
        return tuple(name for name in self.after or () if name not in self.before)


class Observer:
    """Runs a step and keeps what it saw, also of a step that fails."""

    def __init__(self) -> None:
        self.stages: list[ObservedStage] = []
        """The stages in the order in which they began."""
        self.start: tuple[str, ...] = ()
        """The columns of the prompts."""
        self.metrics_read: tuple[str, ...] = ()
        """The columns from which the numbers of the finished step come."""

    def groups(self, groups: Mapping[str, WorkerGroup]) -> dict[str, WorkerGroup]:
        """The groups, whose calls are seen from now on."""
        return {role: cast(WorkerGroup, _Group(self, role, group)) for role, group in groups.items()}

    def run(self, step: Step, stages: Stages, prompts: DataProto, number: int = 1) -> DataProto:
        """Run the step; the stages' groups should be those of `groups`."""
        self.start = _names(prompts)
        batch = step(cast(Stages, _Stages(self, stages)), prompts, number)
        columns = _ReadColumns({name: batch.column(name) for name in batch.columns})
        column_metrics(columns)
        self.metrics_read = tuple(dict.fromkeys(columns.read))
        return batch

    def begin(self, spec: StageSpec, method: str, reads: tuple[str, ...], batch: DataProto) -> ObservedStage:
        """A stage begins."""
        stage = ObservedStage(spec.name, method, reads, spec.writes, _names(batch))
        self.stages.append(stage)
        return stage

    def call(self, call: WorkerCall) -> None:
        """A worker method is called; between stages it is nobody's."""
        if self.stages and self.stages[-1].after is None and call not in self.stages[-1].calls:
            self.stages[-1].calls.append(call)


class _Stages:
    """The stages, each of which reports to the observer when a step calls it."""

    def __init__(self, observer: Observer, stages: Stages) -> None:
        self._observer, self._stages = observer, stages

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stages, name)
        spec = stage_spec_of(method) if callable(method) else None
        if spec is None:
            return method

        @wraps(method)
        def run(batch: DataProto, *args: Any, **kwargs: Any) -> DataProto:
            stage = self._observer.begin(spec, name, spec.reads_of(self._stages), batch)
            result = method(batch, *args, **kwargs)
            stage.after = _names(result)
            return result

        return run


class _Group:
    """A group, whose labelled methods report to the observer."""

    def __init__(self, observer: Observer, role: str, group: WorkerGroup) -> None:
        self._observer, self._role, self._group = observer, role, group

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._group, name)
        return _Method(self, value) if name in self._group.registered_methods else value

    def report(self, method: Any, args: tuple[Any, ...]) -> None:
        spec = method.spec
        values = [part for value in args for part in (value.values if isinstance(value, PerWorker) else (value,))]
        given = next((_names(value) for value in values if isinstance(value, DataProto)), ())
        worker = self._group.worker_class.__name__
        call = WorkerCall(self._role, worker, method.__name__, spec.reads or given, spec.writes)
        if call.reads or call.writes:
            self._observer.call(call)


class _Method:
    def __init__(self, group: _Group, method: Any) -> None:
        self._group, self._method = group, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._group.report(self._method, (*args, *kwargs.values()))
        return self._method(*args, **kwargs)

    def options(self, **options: Any) -> Callable[..., Any]:
        return _Method(self._group, self._method.options(**options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)


class _ReadColumns(UserDict[str, Any]):
    """Columns that remember which of them were read."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.read: list[str] = []
        super().__init__(columns)

    def __getitem__(self, key: str) -> Any:
        self.read.append(key)
        return super().__getitem__(key)


def _names(batch: DataProto) -> tuple[str, ...]:
    return tuple(batch.columns)
