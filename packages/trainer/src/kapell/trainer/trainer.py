"""The life of a run: steps, validation, saving, metrics and timing. What a step does is in `kapell.trainer.steps`."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .algorithms import merge_metrics, metric_values
from .data import PromptDataset, PromptLoader
from .hooks import Hook, Hooks, RunSummary
from .metrics import batch_metrics, metrics_of
from .random_states import random_states, set_random_states
from .run_folder import json_value
from .sampler import Sampling
from .stages import Stages
from .steps import Step
from .validation import rows_of, validate

__all__ = ["Save", "Trainer"]

_logger = logging.getLogger(__name__)

Save = Callable[[int, Callable[[], dict[str, Any]]], None]
"""Saves a step: writes the workers' state first, then what the second argument returns, the trainer's own."""


class Trainer:
    """Runs a step function for ``total_steps`` batches of prompts.

    ``num_workers`` is how many share the work: ``perf/throughput`` is of one.
    """

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
        save: Save | None = None,
        save_freq: int = -1,
        hooks: Sequence[Hook] = (),
        strict_hooks: bool = False,
        num_workers: int = 1,
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
        self._num_workers = num_workers
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._totals: dict[str, float] = defaultdict(float)
        self._samples: list[dict[str, Any]] = []
        self._started = 0.0
        self._saved: Mapping[str, Any] | None = None

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Let `fit` begin after the step that ``state`` was saved at. Raises ``ValueError`` for other prompts.

        That step's metrics and samples are told to the hooks again, since a killed run may not have told them.
        """
        self._loader.load_state_dict(state["data"])
        self._stages.load_state_dict(state["stages"])
        trainer = state["trainer"]
        self._first, self._last = dict(trainer["first"]), dict(trainer["last"])
        self._totals.update(trainer["totals"])
        self._saved = state

    def fit(self) -> RunSummary:
        """Train. Hooks learn of the end even when it comes early."""
        done: int = self._saved["trainer"]["step"] if self._saved else 0
        self._started = time.perf_counter() - (self._saved["trainer"]["seconds"] if self._saved else 0.0)
        error: str | None = None
        if self._saved:
            self._hooks.call("on_rewind", done)
        self._hooks.call("on_start", self._total_steps)
        if self._test_freq > 0 and not self._val:
            _logger.warning("test_freq=%d, but there are no validation prompts: none is validated", self._test_freq)
        try:
            if self._saved:
                self._tell_again(self._saved)
            elif self._val_before_train and self._test_freq > 0:
                self._report(0, self.validate(0))
            for step in range(done + 1, self._total_steps + 1):
                self._report(step, self.train_step(step))
                done = step
        except BaseException as failure:
            error = f"{type(failure).__name__}: {failure}".rstrip(": ")
            raise
        finally:
            summary = RunSummary(
                steps=done,
                total_steps=self._total_steps,
                seconds=time.perf_counter() - self._started,
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
        self._samples = []
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
            "perf/throughput": metrics["perf/total_num_tokens"] / seconds / self._num_workers,
        }
        if self._is_due(step, self._test_freq):
            metrics |= self.validate(step)
        if self._save is not None and self._is_due(step, self._save_freq):
            self._hooks.call("on_save", step)
            self._save(step, self._state_function(step, metrics))
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
        self._samples = found.samples
        self._hooks.call("on_samples", step, found.samples)
        return found.metrics | {"timing_s/testing": time.perf_counter() - started}

    def _state_function(self, step: int, metrics: dict[str, float]) -> Callable[[], dict[str, Any]]:
        started = time.perf_counter()

        def state() -> dict[str, Any]:
            metrics["timing_s/save_checkpoint"] = time.perf_counter() - started
            return {
                "trainer": {
                    "step": step,
                    "seconds": time.perf_counter() - self._started,
                    "first": self._first,
                    "last": self._last,
                    "totals": dict(self._totals),
                },
                "data": self._loader.state_dict(),
                "stages": self._stages.state_dict(),
                "report": {"metrics": metrics, "samples": json_value(self._samples)},
                "random": random_states(),
            }

        return state

    def _tell_again(self, saved: Mapping[str, Any]) -> None:
        """The rest of the saved step, in the order in which it goes after saving."""
        step, report = saved["trainer"]["step"], saved["report"]
        if report["samples"]:
            self._hooks.call("on_samples", step, report["samples"])
        set_random_states(saved["random"])
        self._report(step, report["metrics"])

    def _is_due(self, step: int, frequency: int) -> bool:
        return frequency > 0 and (step % frequency == 0 or step == self._total_steps)

    def _report(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._first.setdefault(name, value)
            self._last[name] = value
            if name.startswith("timing_s/") or name == "perf/total_num_tokens":
                self._totals[name] += value
        self._hooks.call("on_metrics", step, metrics)
