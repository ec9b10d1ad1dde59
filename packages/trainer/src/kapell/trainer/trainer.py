"""The life of a run: steps, validation, saving, metrics and timing. What a step does is in `kapell.trainer.steps`."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from .algorithms import merge_metrics, metric_values
from .data import PromptDataset, PromptLoader
from .hooks import Hook, Hooks, RunSummary
from .metrics import batch_metrics, metrics_of
from .sampler import Sampling
from .stages import Stages
from .steps import Step
from .validation import rows_of, validate

__all__ = ["Trainer"]

_logger = logging.getLogger(__name__)


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
        if self._test_freq > 0 and not self._val:
            _logger.warning("test_freq=%d, but there are no validation prompts: none is validated", self._test_freq)
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
        if "solution_str" in batch.columns and self._hooks.wants("on_rollouts"):
            self._hooks.call("on_rollouts", step, rows_of(batch))
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
        """Each validation prompt once, times samples; the metrics of `kapell.trainer.validation.score_metrics`."""
        if self._val is None or not len(self._val):
            return {}
        started = time.perf_counter()
        found = validate(
            self._stages,
            self._val,
            step=step,
            sampling=self._val_sampling,
            num_samples=self._val_samples,
            batch_size=self._val_batch_size,
        )
        self._hooks.call("on_samples", step, found.samples)
        return found.metrics | {"timing_s/testing": time.perf_counter() - started}

    def _is_due(self, step: int, frequency: int) -> bool:
        return frequency > 0 and (step % frequency == 0 or step == self._total_steps)

    def _report(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._first.setdefault(name, value)
            self._last[name] = value
            if name.startswith("timing_s/") or name == "perf/total_num_tokens":
                self._totals[name] += value
        self._hooks.call("on_metrics", step, metrics)
