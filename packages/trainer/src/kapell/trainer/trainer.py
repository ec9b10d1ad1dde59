"""The life of a run: steps, validation, saving, metrics and timing. What a step does is in `kapell.trainer.steps`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kapell.protocol import DataProto

from .algorithms import Metric, merge_metrics, metric_values
from .data import PromptDataset, PromptLoader, in_batches
from .hooks import Hook, Hooks, RunSummary
from .metrics import batch_metrics, metrics_of
from .sampler import Sampling
from .stages import Stages
from .steps import Step

__all__ = ["Trainer"]

_VALIDATION_STREAM = 2**32  # keeps the random numbers of validation apart from those of any training step


class Trainer:
    """Runs a step function for ``total_steps`` batches of prompts."""

    def __init__(
        self,
        step: Step,
        stages: Stages,
        train: PromptDataset,
        loader: PromptLoader,
        *,
        total_steps: int,
        val: PromptDataset | None = None,
        val_sampling: Sampling | None = None,
        val_samples: int = 1,
        val_batch_size: int | None = None,
        val_before_train: bool = True,
        test_freq: int = -1,
        save: Callable[[int], None] | None = None,
        save_freq: int = -1,
        hooks: Sequence[Hook] = (),
        strict_hooks: bool = False,
    ) -> None:
        self._step = step
        self._stages = stages
        self._train = train
        self._loader = loader
        self._total_steps = total_steps
        self._val = val
        self._val_sampling = val_sampling or Sampling(do_sample=False)
        self._val_samples = val_samples
        self._val_batch_size = val_batch_size
        self._val_before_train = val_before_train
        self._test_freq = test_freq
        self._save = save
        self._save_freq = save_freq
        self._hooks = Hooks(hooks, strict=strict_hooks)
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._totals: dict[str, float] = defaultdict(float)

    def fit(self) -> RunSummary:
        """Train. Hooks learn of the end even when it comes early."""
        started = time.perf_counter()
        done = 0
        error: str | None = None
        self._hooks.call("on_start", self._total_steps)
        try:
            if self._val_before_train and self._test_freq > 0:
                self._report(0, self.validate(0))
            for step in range(1, self._total_steps + 1):
                self._report(step, self.train_step(step))
                done = step
        except BaseException as failure:
            error = f"{type(failure).__name__}: {failure}".rstrip(": ")
            raise
        finally:
            summary = RunSummary(
                steps=done,
                total_steps=self._total_steps,
                seconds=time.perf_counter() - started,
                first=self._first,
                last=self._last,
                totals=dict(self._totals),
                error=error,
            )
            self._hooks.call("on_end", summary)
        return summary

    def train_step(self, step: int) -> dict[str, float]:
        """One step with its validation and saving, where they are due; the step's metrics."""
        started = time.perf_counter()
        epoch = self._loader.state.epoch
        prompts = self._train.batch(self._loader.next_batch())
        batch = self._step(self._stages, prompts, step)
        seconds = time.perf_counter() - started
        metrics = metric_values(merge_metrics([metrics_of(batch), batch_metrics(batch)]))
        metrics |= {
            "training/global_step": step,
            "training/epoch": epoch,
            "timing_s/step": seconds,
            "perf/time_per_step": seconds,
            "perf/throughput": metrics["perf/total_num_tokens"] / seconds,
        }
        if self._is_due(step, self._test_freq):
            metrics |= self.validate(step)
        if self._save is not None and self._is_due(step, self._save_freq):
            started = time.perf_counter()
            self._save(step)
            metrics["timing_s/save_checkpoint"] = time.perf_counter() - started
        return metrics

    def validate(self, step: int) -> dict[str, float]:
        """Each validation prompt once (times samples): ``val/exact_match`` and ``val/score/mean``."""
        if self._val is None or not len(self._val):
            return {}
        started = time.perf_counter()
        parts: list[Mapping[str, Metric]] = []
        samples: list[dict[str, Any]] = []
        for indices in in_batches(len(self._val), self._val_batch_size or len(self._val)):
            batch = self._stages.sample(
                self._val.batch(indices), self._val_sampling, self._val_samples, _VALIDATION_STREAM + step
            )
            batch = self._stages.scorer(batch)
            parts.append(_validation_metrics(batch))
            samples += _samples(batch)
        self._hooks.call("on_samples", step, samples)
        return metric_values(merge_metrics(parts)) | {"timing_s/testing": time.perf_counter() - started}

    def _is_due(self, step: int, frequency: int) -> bool:
        return frequency > 0 and (step % frequency == 0 or step == self._total_steps)

    def _report(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._first.setdefault(name, value)
            self._last[name] = value
            if name.startswith("timing_s/") or name == "perf/total_num_tokens":
                self._totals[name] += value
        self._hooks.call("on_metrics", step, metrics)


def _validation_metrics(batch: DataProto) -> dict[str, Metric]:
    scores = batch.column("rm_scores").sum(-1).tolist()
    matches = batch.column("exact_match").tolist()
    sources = batch.non_tensor_batch["data_source"].tolist()
    by_name: dict[str, list[float]] = defaultdict(list)
    for score, match, source in zip(scores, matches, sources, strict=True):
        for prefix in ("val", f"val/{source}"):
            by_name[f"{prefix}/score/mean"].append(score)
            by_name[f"{prefix}/exact_match"].append(match)
    return {name: Metric.mean(sum(values) / len(values), weight=len(values)) for name, values in by_name.items()}


def _samples(batch: DataProto) -> list[dict[str, Any]]:
    columns = batch.non_tensor_batch
    scores = batch.column("rm_scores").sum(-1).tolist()
    rows = zip(
        columns["raw_prompt"],
        columns["solution_str"],
        columns["ground_truth"],
        scores,
        batch.column("exact_match").tolist(),
        strict=True,
    )
    names = ("prompt", "response", "ground_truth", "score", "exact_match")
    return [dict(zip(names, row, strict=True)) for row in rows]
