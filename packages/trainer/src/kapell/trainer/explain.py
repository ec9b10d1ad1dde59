"""Who writes and reads each column in a configuration, from the stages and worker methods that a step really used."""

from __future__ import annotations

from dataclasses import dataclass, field

from .config import Config
from .observe import ObservedStage, Observer
from .stand_in import observe_stand_in

__all__ = ["DATA", "METRICS", "ColumnFlow", "StepFlow", "explain_columns", "flow_of", "mermaid"]

DATA = "data"
"""Stands for the rows of the data set, as a writer."""
METRICS = "metrics"
"""Stands for the numbers of the finished step, as a reader."""


@dataclass
class ColumnFlow:
    """A column: who makes it and who uses it, each by its stage, with the worker's method where one does it."""

    name: str
    """The column."""
    writers: dict[str, str] = field(default_factory=dict)
    """Stage to ``role.method``, or to "" where the controller makes it."""
    readers: dict[str, str] = field(default_factory=dict)
    """The same for those who read it."""


@dataclass(frozen=True)
class StepFlow:
    """The columns of a step."""

    actors: dict[str, str]
    """Who takes part, in order: `DATA`, the stages and `METRICS`, each with the roles whose workers it calls."""
    calls: dict[str, list[str]]
    """The worker methods that each stage calls, as ``role.method``."""
    columns: list[ColumnFlow]
    """The columns, in the order in which they appear."""


def explain_columns(config: Config) -> StepFlow:
    """Run one step of the configuration in small and say who wrote and read each column."""
    return flow_of(observe_stand_in(config).observer)


def flow_of(observer: Observer) -> StepFlow:
    """Who wrote and read each column in an observed step."""
    columns = {name: ColumnFlow(name, writers={DATA: ""}) for name in observer.start}
    actors = {DATA: ""}
    for stage in observer.stages:
        actors[stage.name] = ", ".join(dict.fromkeys(call.role for call in stage.calls))
        for name in stage.made:
            columns.setdefault(name, ColumnFlow(name)).writers[stage.name] = _caller(stage, name, written=True)
        for name in _read(stage):
            columns.setdefault(name, ColumnFlow(name)).readers[stage.name] = _caller(stage, name, written=False)
    actors[METRICS] = ""
    for name in observer.metrics_read:
        columns[name].readers[METRICS] = ""
    calls = {stage.name: [f"{call.role}.{call.method}" for call in stage.calls] for stage in observer.stages}
    return StepFlow(actors, calls, list(columns.values()))


def mermaid(flow: StepFlow) -> str:
    """The flow as a Mermaid diagram: stages, and on each arrow the columns that the next one reads from it."""
    ids = {actor: f"s{number}" for number, actor in enumerate(flow.actors)}
    lines = ["flowchart TD"]
    for actor, roles in flow.actors.items():
        label = f"{actor}<br/><i>{roles}</i>" if roles else actor
        lines.append(f'    {ids[actor]}["{label}"]')
    arrows: dict[tuple[str, str], list[str]] = {}
    for column in flow.columns:
        for writer in column.writers:
            for reader in column.readers:
                if writer != reader:
                    arrows.setdefault((writer, reader), []).append(column.name)
    lines += [
        f'    {ids[writer]} -- "{"<br/>".join(names)}" --> {ids[reader]}' for (writer, reader), names in arrows.items()
    ]
    return "\n".join(lines) + "\n"


def _read(stage: ObservedStage) -> list[str]:
    """What the stage says that it reads, and what the workers got from the batch."""
    sent = [name for call in stage.calls for name in call.reads if name in stage.before or name in stage.made]
    return list(dict.fromkeys([*stage.reads, *sent]))


def _caller(stage: ObservedStage, column: str, *, written: bool) -> str:
    methods = [
        f"{call.role}.{call.method}" for call in stage.calls if column in (call.writes if written else call.reads)
    ]
    return ", ".join(methods)
