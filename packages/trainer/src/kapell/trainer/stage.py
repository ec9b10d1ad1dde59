"""What makes a method a stage of a step: its columns are checked, its time is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from kapell.protocol import DataProto

from .algorithms import Metric
from .metrics import add_metrics

__all__ = ["StageSpec", "stage", "stage_spec_of"]

Params = ParamSpec("Params")
StageMethod = Callable[Concatenate[Any, DataProto, Params], DataProto]

_LABEL = "__kapell_stage__"
_makers: dict[str, list[str]] = {}  # which stages make a column, for messages


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """What a stage is called in ``timing_s/<name>``, and the columns it needs and makes."""

    name: str
    reads: tuple[str, ...] | Callable[[Any], tuple[str, ...]] = ()
    """The columns it needs; a function of the stages where they depend on the algorithm."""
    writes: tuple[str, ...] = ()
    """The columns it makes."""

    def reads_of(self, stages: Any) -> tuple[str, ...]:
        """The columns it needs among these stages."""
        return self.reads if isinstance(self.reads, tuple) else self.reads(stages)


def stage(
    name: str, *, reads: tuple[str, ...] | Callable[[Any], tuple[str, ...]] = (), writes: tuple[str, ...] = ()
) -> Callable[[StageMethod[Params]], StageMethod[Params]]:
    """Label a method from a batch to a batch as a stage: its columns are checked and its time is measured."""
    spec = StageSpec(name=name, reads=reads, writes=writes)
    for column in writes:
        _makers.setdefault(column, []).append(name)

    def label(method: StageMethod[Params]) -> StageMethod[Params]:
        @wraps(method)
        def run(self: Any, batch: DataProto, *args: Params.args, **kwargs: Params.kwargs) -> DataProto:
            _require_columns(name, spec.reads_of(self), batch)
            started = time.perf_counter()
            result = method(self, batch, *args, **kwargs)
            return add_metrics(result, {f"timing_s/{name}": Metric.sum(time.perf_counter() - started)})

        setattr(run, _LABEL, spec)
        return run

    return label


def stage_spec_of(method: Callable[..., Any]) -> StageSpec | None:
    """The label of a stage; None for any other function."""
    return getattr(method, _LABEL, None)


def _require_columns(stage: str, reads: tuple[str, ...], batch: DataProto) -> None:
    missing = [name for name in reads if name not in batch.columns]
    if not missing:
        return
    makers = _makers.get(missing[0])
    hint = f"run the stage {' or '.join(makers)} first" if makers else "it comes with the prompts"
    raise ValueError(
        f"stage {stage!r} needs column {missing[0]!r}, which the batch does not have; {hint}. "
        f"The batch has: {', '.join(sorted(batch.columns))}"
    )
