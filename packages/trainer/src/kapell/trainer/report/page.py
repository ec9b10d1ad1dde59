"""Puts the page together: what is shown of a run, in which order and words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ..config_trainer import TrainerConfig
from ..run_folder import CURVES
from .charts import Series, line_chart, stacked_bars, tidy
from .run_data import RunData, load_run
from .timing import stage_seconds, time_by_role

__all__ = ["render_report", "write_report"]

_CARDS = {
    "exact match, held out": "val/exact_match",
    "reward, held out": "val/score/mean",
    "reward, training": "critic/score/mean",
    "entropy": "actor/entropy",
    "tokens per second and worker": "perf/throughput",
    "seconds per step": "timing_s/step",
}
_SHARES = {"val/exact_match"}
_SAMPLE_PROMPTS = 12
_SAMPLE_STEPS = 6
_MAX_TEXT = 1000
_DEFAULT = "default"
_MISSING = "n/a"
_STAGE_COLORS = {  # the same in every run
    "update_actor": 1,
    "gen": 2,
    "old_log_prob": 3,
    "update_critic": 4,
    "ref": 5,
    "values": 8,
    "testing": 7,
    "reward": 9,
    "reward_model": 10,
}
_OTHER_COLOR = 6


def write_report(folders: Sequence[str | Path], output: str | Path) -> Path:
    """Write the page about one or two runs to ``output``. Raises ``FileNotFoundError`` for a folder without a run."""
    path = Path(output).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_report([load_run(folder) for folder in folders]), encoding="utf-8")
    return path


def render_report(runs: Sequence[RunData]) -> str:
    """The page as text: it loads nothing, from the network or elsewhere."""
    if not 1 <= len(runs) <= 2:
        raise ValueError(f"a report is about one run or two, got {len(runs)}")
    for run in runs:
        if not run.records:
            raise ValueError(f"run {run.name} has no steps yet")
    resources = files("kapell.trainer.report")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((resources / "page.html.jinja").read_text(encoding="utf-8"))
    main, more = _charts(runs)
    return template.render(
        title=" and ".join(run.name for run in runs),
        subtitle="; ".join(_subtitle(run) for run in runs),
        names=[run.name for run in runs],
        compared=len(runs) > 1,
        css=Markup((resources / "page.css").read_text(encoding="utf-8")),
        script=Markup((resources / "page.js").read_text(encoding="utf-8")),
        cards=_cards(runs),
        charts=main,
        more_charts=more,
        timing=[_timing(run) for run in runs if any(run.points("timing_s/step"))],
        responses=[_responses(run) for run in runs if run.samples],
        config=_config(runs),
    )


def _planned_steps(config: Mapping[str, Any]) -> int | None:
    if "trainer.total_training_steps" not in config:  # a run of somebody's own loop
        return None
    steps, epochs = (config.get(f"trainer.total_{key}") for key in ("training_steps", "epochs"))
    return TrainerConfig(total_training_steps=steps, total_epochs=epochs).planned_steps


def _subtitle(run: RunData) -> str:
    steps = int(run.records[-1]["step"])
    planned = _planned_steps(run.config)
    parts = [f"{steps} of {planned} steps" if planned and planned != steps else f"{steps} steps"]
    estimator, backend = run.config.get("algorithm.adv_estimator"), run.config.get("backend.name")
    if estimator:
        parts.append(str(estimator))
    if backend:
        workers = run.config["trainer.nnodes"] * run.config["trainer.n_gpus_per_node"]
        parts.append(f"{workers} worker{'s' if workers > 1 else ''} on {backend}")
    return " · ".join(parts)


def _cards(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    cards = []
    for label, metric in _CARDS.items():
        ends = [run.first_and_last(metric) for run in runs]
        if any(ends):
            rows = [{"first": "", "last": _MISSING} if end is None else _ends(metric, *end) for end in ends]
            cards.append({"label": label, "rows": rows})
    return cards


def _ends(metric: str, first: float, last: float) -> dict[str, str]:
    form = (lambda value: f"{value:.1%}") if metric in _SHARES else tidy
    return {"first": form(first), "last": form(last)}


def _charts(runs: Sequence[RunData]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The charts that every run is looked at by, and one for each of the other metrics."""
    names = sorted({name for run in runs for name in run.metric_names()})
    groups = {title: [name for name in metrics if name in names] for title, metrics in CURVES.items()}
    core = [name for name in names if name.startswith("val-core/") and not name.endswith("/std")]
    if any("@" in name and not name.endswith("@1") for name in core):
        groups["validation"] = core[:6]
    shown = {name for metrics in groups.values() for name in metrics}
    main = [_chart(title, metrics, runs) for title, metrics in groups.items() if metrics]
    return main, [_chart(name, [name], runs) for name in names if name not in shown and name != "training/global_step"]


def _chart(title: str, metrics: Sequence[str], runs: Sequence[RunData]) -> dict[str, Any]:
    series = []
    for place, run in enumerate(runs):
        for color, metric in enumerate(metrics, start=1):
            shade = color if len(metrics) > 1 else place + 1
            name = metric if len(runs) == 1 else f"{metric} ({run.name})"
            series.append(Series(name, run.points(metric), shade, dashed=place == 1))
    single = len(metrics) == 1 and len(runs) == 1
    legend = [] if single and metrics[0] == title else [line for line in series if line.points]
    return {"title": title, "svg": Markup(line_chart(series, title)), "legend": legend}


def _timing(run: RunData) -> dict[str, Any]:
    steps, stages = stage_seconds(run)
    total = sum(sum(values) for values in stages.values()) or 1.0
    large = {name: values for name, values in stages.items() if sum(values) >= 0.01 * total}
    small = [values for name, values in stages.items() if name not in large]
    if small:
        large["others"] = [sum(column) for column in zip(*small, strict=True)]
    rows = [
        {
            "role": "" if row.stage else row.role,
            "stage": row.stage,
            "is_role": not row.stage,
            "total": f"{row.seconds:,.2f}",
            "per_step": f"{row.seconds / len(steps):.4f}",
            "percent": f"{100 * row.seconds / total:.1f}",
        }
        for row in time_by_role(stages)
    ]
    colors = {name: _STAGE_COLORS.get(name, _OTHER_COLOR) for name in large}
    bars = Markup(stacked_bars(steps, large, colors, "seconds per step"))
    return {"name": run.name, "bars": bars, "stages": colors, "rows": rows}


def _responses(run: RunData) -> dict[str, Any]:
    """The same prompts over some of the validations, the first and the last among them."""
    steps = sorted(run.samples)
    if len(steps) > _SAMPLE_STEPS:
        last = len(steps) - 1
        steps = [steps[round(place * last / (_SAMPLE_STEPS - 1))] for place in range(_SAMPLE_STEPS)]
    by_step = {step: _first_answers(run.samples[step]) for step in steps}
    prompts = list(by_step[steps[-1]].items())[:_SAMPLE_PROMPTS]
    rows = [
        {
            "prompt": _cut(sample["prompt"]),
            "wanted": _cut(sample["ground_truth"]),
            "answers": [_answer(by_step[step].get(key)) for step in steps],
        }
        for key, sample in prompts
    ]
    return {"name": run.name, "steps": steps, "rows": rows}


def _first_answers(samples: Sequence[Mapping[str, Any]]) -> dict[Any, Mapping[str, Any]]:
    answers: dict[Any, Mapping[str, Any]] = {}
    for sample in samples:
        answers.setdefault(sample.get("uid", sample["prompt"]), sample)
    return answers


def _answer(sample: Mapping[str, Any] | None) -> dict[str, Any]:
    if sample is None:
        return {"text": None, "right": False}
    score = _MISSING if sample["score"] is None else f"{sample['score']:.3g}"
    return {"text": _cut(sample["response"]), "right": sample["exact_match"] == 1.0, "score": score}


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def _config(runs: Sequence[RunData]) -> dict[str, list[dict[str, Any]]]:
    """Keys that were set, or that differ between the runs, and the rest."""
    rows, rest = [], []
    for key in dict.fromkeys(key for run in runs for key in run.config):
        cells = [
            {"value": str(run.config.get(key, _MISSING)), "origin": run.origins.get(key, _DEFAULT)} for run in runs
        ]
        differs = len({cell["value"] for cell in cells}) > 1
        is_set = differs or any(cell["origin"] != _DEFAULT for cell in cells)
        (rows if is_set else rest).append({"key": key, "cells": cells, "differs": differs})
    return {"rows": rows or rest, "rest": rest if rows else []}
