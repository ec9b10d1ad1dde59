"""The doctor's walk through the folder of a run, finished or not, from the files that it left."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from .agreement import LARGEST_GAP
from .config import Config
from .config_load import load_config
from .doctor import Finding, check_mode, check_overrides, failure_findings
from .failure import RunFailure, read_failure

__all__ = ["examine_run"]

_SHARE_CUT = 0.99  # of the responses: nearly none of them ends by itself

Record = Mapping[str, Any]


def examine_run(folder: str | Path) -> Iterator[Finding]:
    """Findings from ``config.yaml``, ``metrics.jsonl`` and ``failure.json`` of a run's folder, as they come.

    Raises ``FileNotFoundError`` where there is no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no run folder {folder}")
    config_file = folder / "config.yaml"
    if not config_file.is_file():
        yield Finding("overrides", f"{folder} has no config.yaml", "give the folder that `kapell train` made")
        return
    try:
        resolved = load_config([config_file])
        if (origins := folder / "config_origins.yaml").is_file():
            resolved = replace(resolved, origins=yaml.safe_load(origins.read_text()))
    except ValueError as error:
        yield Finding("overrides", str(error), f"correct {config_file}, or train again with this version")
        return
    yield from check_overrides(resolved)
    yield check_mode(resolved)
    failure = read_failure(folder)
    records = list(_records(folder / "metrics.jsonl"))
    yield from _progress(records, resolved.config, failure)
    yield from _numbers(records, resolved.config)
    yield from failure_findings(failure)


def _records(file: Path) -> Iterator[Record]:
    if file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue  # the line that was being written when the process ended


def _progress(records: Sequence[Record], config: Config, failure: RunFailure | None) -> Iterator[Finding]:
    if "file" not in config.trainer.logger:
        loggers = ", ".join(config.trainer.logger)
        yield Finding("progress", f"no numbers were kept here: trainer.logger=[{loggers}] is without file")
        return
    steps, wanted = max((record["step"] for record in records), default=0), config.trainer.planned_steps
    if not records:
        starting = failure is not None and any(" in __init__" in worker.place for worker in failure.workers)
        what = "not all could be created" if starting else "the run ended before its first step"
        yield Finding("workers", what, "the errors below say why" if failure else "train with this configuration again")
        return
    yield Finding("workers", f"created; {steps}{'' if wanted is None else f' of {wanted}'} steps have metrics")
    if wanted is not None and steps < wanted and failure is None and config.trainer.total_epochs is None:
        yield Finding(
            "progress",
            f"{steps} of {wanted} steps, and no error was written",
            "the process still runs, or was killed: look at memory (dmesg) and the scheduler's log",
        )


def _numbers(records: Sequence[Record], config: Config) -> Iterator[Finding]:
    steps = [record for record in records if "response_length/mean" in record]
    if not steps:
        return
    broken = [(record["step"], name) for record in records for name, value in record.items() if value is None]
    if broken:
        step, name = broken[0]
        yield Finding(
            "agreement",
            f"{name} is NaN or infinite from step {step} on ({len(broken)} such values)",
            "lower the learning rate, or look at the rewards and masks of that step",
        )
    longest, cut = config.data.max_response_length, steps[-1].get("response_length/clip_ratio") or 0.0
    if any((record["response_length/max"] or 0) > longest for record in steps):
        yield Finding(
            "agreement", f"responses longer than {longest} tokens", "the mask and data.max_response_length differ"
        )
    elif cut > _SHARE_CUT:
        yield Finding(
            "agreement",
            f"{cut:.0%} of the responses of the last step were cut off at {longest} tokens",
            "raise data.max_response_length, or check that the model writes its end-of-sequence token",
        )
    gap = max((record.get("training/rollout_log_probs_diff_max") or 0.0 for record in steps), default=0.0)
    largest_gap = LARGEST_GAP[config.actor_rollout_ref.model.dtype]
    if gap > largest_gap:
        yield Finding(
            "agreement",
            f"the sampler's log-probabilities differ from the trainer's by up to {gap:.3g}",
            "bring the sampler the newest weights, or set algorithm.rollout_correction",
        )
    yield from _rewards(steps)
    if not broken and cut <= _SHARE_CUT and gap <= largest_gap:
        last = steps[-1]["response_length/mean"]
        yield Finding(
            "agreement", f"all numbers are finite; responses of {last:.3g} tokens on average (at most {longest})"
        )


def _rewards(steps: Sequence[Record]) -> Iterator[Finding]:
    scores = {record.get(f"critic/score/{end}") for record in steps for end in ("min", "max")}
    if len(steps) > 1 and len(scores) == 1 and (score := scores.pop()) is not None:
        yield Finding(
            "rewards",
            f"every response of every step scored {score:g}, so there is nothing to learn from",
            "try the reward function on a response by hand (`kapell samples` shows some)",
        )
    if errors := sum(record.get("reward/errors") or 0 for record in steps):
        yield Finding("rewards", f"{errors:g} responses could not be scored", "the log names the first of each step")
