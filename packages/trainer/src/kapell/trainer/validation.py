"""Validation: every held-out prompt exactly once, times its samples, and the scores per data source and sample id."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Real
from typing import Any

from kapell.protocol import DataProto

from .algorithms import Metric, merge_metrics, metric_values, validation_metrics
from .data import PromptDataset, in_batches
from .metrics import metrics_of
from .sampler import Sampling
from .stages import Stages

__all__ = ["Validation", "check_metric", "rows_of", "score_metrics", "validate"]

_VALIDATION_STREAM = 2**32  # keeps the random numbers of validation apart from those of any training step
_PREDICTION = "pred"
_CORE = ("mean@", "maj@", "best@", "pass@")


@dataclass(frozen=True)
class Validation:
    """What a validation found."""

    metrics: dict[str, float]
    """Numbers to log."""
    samples: list[dict[str, Any]]
    """Each response as a mapping, see `rows_of`."""


def validate(
    stages: Stages,
    prompts: PromptDataset,
    *,
    step: int,
    sampling: Sampling,
    num_samples: int = 1,
    batch_size: int | None = None,
) -> Validation:
    """Answer and score each prompt ``num_samples`` times; batch size and workers change neither samples nor numbers."""
    parts: list[Mapping[str, Metric]] = []
    samples: list[dict[str, Any]] = []
    for indices in in_batches(len(prompts), batch_size or max(len(prompts), 1)):
        batch = stages.sample(prompts.batch(indices), sampling, num_samples, _VALIDATION_STREAM + step)
        batch = stages.scorer(batch)
        errors = metrics_of(batch).get("reward/errors")
        parts.append({"val/reward_errors": errors} if errors is not None else {})
        samples += rows_of(batch)
    if not samples:
        return Validation({}, [])
    return Validation(metric_values(merge_metrics([*parts, score_metrics(samples)])), samples)


def rows_of(batch: DataProto) -> list[dict[str, Any]]:
    """Each row of a scored batch: ``uid``, ``data_source``, ``prompt``, ``response``, ``ground_truth``, ``score``,
    ``exact_match``, and under ``reward_extra`` what else the rewards returned.
    """
    columns = batch.non_tensor_batch
    named = {
        "uid": columns["uid"],
        "data_source": columns["data_source"],
        "prompt": columns["raw_prompt"],
        "response": columns["solution_str"],
        "ground_truth": columns["ground_truth"],
        "score": batch.column("rm_scores").sum(-1).tolist(),
        "exact_match": batch.column("exact_match").tolist(),
        "reward_extra": columns.get("reward_extra", [{}] * len(batch)),
    }
    return [dict(zip(named, row, strict=True)) for row in zip(*named.values(), strict=True)]


def score_metrics(samples: Sequence[Mapping[str, Any]]) -> dict[str, Metric]:
    """The numbers of a validation, from its rows.

    ``val/score/mean`` and ``val/exact_match`` over all rows, ``val/<source>/...`` over those of a data source. By
    verl's names, ``val-core`` or ``val-aux``, then ``<source>/<variable>/<metric>``: the variables are ``reward``,
    ``acc`` (the exact match, which is a reward's own ``acc`` where it returns one) and each number among the rewards'
    extras; the metrics are those of `kapell.trainer.algorithms.validation_metrics`, over samples with the same id. The
    core is ``acc`` of all answers. A majority is one of equal ``pred`` in the extras, or else of equal responses.
    """
    sources = [sample["data_source"] for sample in samples]
    variables: dict[str, list[Any]] = {
        "reward": [sample["score"] for sample in samples],
        "acc": [sample["exact_match"] for sample in samples],
    }
    extras = [sample["reward_extra"] for sample in samples]
    for name in dict.fromkeys(name for extra in extras for name in extra if name.rpartition("/")[2] != "exact_match"):
        values = [extra.get(name) for extra in extras]
        if all(value is None or isinstance(value, Real) for value in values):
            variables.setdefault(name, values)
    detailed = validation_metrics(
        sources, [sample["uid"] for sample in samples], variables, predictions=_predictions(samples)
    )
    most = {source: _most_answers(detailed, source) for source in dict.fromkeys(sources)}
    return _plain_means(samples) | {_section(name, most): metric for name, metric in detailed.items()}


def check_metric(name: str, data_sources: Sequence[str], num_samples: int) -> None:
    """Refuse a metric that no validation of these data sources will have.

    The numbers that rewards add, ``val-aux/<source>/<name>/...``, are not known before: any name is taken there.
    """
    empty = {"response": "", "score": 0.0, "exact_match": 0.0, "reward_extra": {}}
    samples = [{**empty, "data_source": source, "uid": "0"} for source in data_sources for _ in range(num_samples)]
    known = ["val/reward_errors", *score_metrics(samples)]
    tails = {key.rpartition("/reward/")[2] for key in known if key.startswith("val-aux/") and "/reward/" in key}
    added = name.endswith(tuple(f"/{tail}" for tail in tails)) and "/acc/" not in name and "/reward/" not in name
    if name not in known and not (added and name.startswith(tuple(f"val-aux/{source}/" for source in data_sources))):
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
        raise ValueError(f"the validation has no metric {name}; {hint}")


def _predictions(samples: Sequence[Mapping[str, Any]]) -> list[Hashable]:
    return [_prediction(sample["reward_extra"], sample["response"]) for sample in samples]


def _prediction(extra: Mapping[str, Any], response: str) -> str:
    """What a reward read as the answer, whichever of several rewards; else the response."""
    named = (value for name, value in extra.items() if name.rpartition("/")[2] == _PREDICTION and value is not None)
    return str(next(named, response.strip()))


def _most_answers(detailed: Mapping[str, Metric], source: str) -> int:
    prefix = f"{source}/acc/mean@"
    return max(int(name.removeprefix(prefix)) for name in detailed if name.startswith(prefix))


def _section(name: str, most: Mapping[str, int]) -> str:
    for source, answers in most.items():
        tail = name.removeprefix(f"{source}/acc/")
        if tail != name and tail.startswith(tuple(f"{core}{answers}" for core in _CORE)):
            return f"val-core/{name}"
    return f"val-aux/{name}"


def _plain_means(samples: Sequence[Mapping[str, Any]]) -> dict[str, Metric]:
    parts = [
        {
            f"{prefix}/{name}": Metric.mean(sample[key], weight=1)
            for prefix in ("val", f"val/{sample['data_source']}")
            for name, key in (("score/mean", "score"), ("exact_match", "exact_match"))
        }
        for sample in samples
    ]
    return merge_metrics(parts)
