"""Where a run's time went: seconds per stage, gathered by the role that does the stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .run_data import RunData

__all__ = ["StageTime", "stage_seconds", "time_by_role"]

_PREFIX = "timing_s/"
_STEP = "step"
_ROLES: Mapping[str, tuple[str, ...]] = {
    "rollout": ("gen", "gen_max"),
    "actor": ("old_log_prob", "update_actor"),
    "reference": ("ref",),
    "critic": ("values", "update_critic"),
    "reward": ("reward", "reward_model"),
    "validation": ("testing",),
    "checkpoint": ("save_checkpoint",),
}
_CONTROLLER = "controller"
_OUTSIDE_STEP = ("testing", "save_checkpoint")
REST = "rest"


@dataclass(frozen=True)
class StageTime:
    """The time of one stage, or of a role where ``stage`` is empty."""

    role: str
    stage: str
    seconds: float


def stage_seconds(run: RunData) -> tuple[list[float], dict[str, list[float]]]:
    """Training steps, and the seconds that each stage took in them; ``rest`` is what no stage accounts for."""
    records = [record for record in run.records if record.get(f"{_PREFIX}{_STEP}") is not None]
    names = [name for name in run.metric_names() if name.startswith(_PREFIX) and name != f"{_PREFIX}{_STEP}"]
    stages = {name.removeprefix(_PREFIX): [record.get(name) or 0.0 for record in records] for name in names}
    inside = [values for stage, values in stages.items() if stage not in _OUTSIDE_STEP]
    rest = [
        max(record[f"{_PREFIX}{_STEP}"] - sum(values[place] for values in inside), 0.0)
        for place, record in enumerate(records)
    ]
    by_size = sorted(stages.items(), key=lambda item: -sum(item[1]))
    return [record["step"] for record in records], dict([*by_size, (REST, rest)])


def time_by_role(stages: Mapping[str, list[float]]) -> list[StageTime]:
    """Each role and below it its stages, the longest first."""
    role_of = {stage: role for role, members in _ROLES.items() for stage in members}
    members: dict[str, list[StageTime]] = {}
    for stage, values in stages.items():
        role = role_of.get(stage, _CONTROLLER)
        members.setdefault(role, []).append(StageTime(role, stage, sum(values)))
    totals = {role: sum(stage.seconds for stage in those) for role, those in members.items()}
    rows = []
    for role in sorted(totals, key=lambda role: -totals[role]):
        rows.append(StageTime(role, "", totals[role]))
        if len(members[role]) > 1:
            rows += sorted(members[role], key=lambda stage: -stage.seconds)
    return rows
