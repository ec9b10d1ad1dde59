"""What may watch a run: a hook sees each step's numbers and can neither change nor stop the training."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Hook", "Hooks", "RunSummary"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run that has ended."""

    steps: int
    """Steps that were trained."""
    total_steps: int
    """Steps that were planned."""
    seconds: float
    """Time from first to last."""
    first: Mapping[str, float] = field(default_factory=dict)
    """The first value of each metric."""
    last: Mapping[str, float] = field(default_factory=dict)
    """The last value of each metric."""
    totals: Mapping[str, float] = field(default_factory=dict)
    """The sum of each ``timing_s/...`` and of ``perf/total_num_tokens``."""
    error: str | None = None
    """Why the run ended early, if it did."""


class Hook:
    """Override what is needed. An exception in a hook is reported once and otherwise ignored."""

    def on_rewind(self, step: int) -> None:
        """Before `on_start`, the run goes on from a checkpoint (or, for step 0, begins anew): forget what was logged.

        That is the metrics and samples of this step, which are told again, and everything of later steps.
        """

    def on_start(self, total_steps: int) -> None:
        """The run begins."""

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done (or, for step 0, the validation before the first)."""

    def on_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """A validation is done; `kapell.trainer.validation.rows_of` says what a sample holds."""

    def on_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A training step is done; its responses, as in `on_samples`."""

    def on_save(self, step: int) -> None:
        """A checkpoint is about to be written: bring what was logged to where a crash cannot lose it."""

    def on_end(self, summary: RunSummary) -> None:
        """The run has ended, as planned or not."""


class Hooks:
    """Calls several hooks; one that fails disturbs neither the training nor the others, unless ``strict``."""

    def __init__(self, hooks: Sequence[Hook], *, strict: bool = False) -> None:
        self._hooks = tuple(hooks)
        self._strict = strict
        self._reported: set[int] = set()

    def wants(self, method: str) -> bool:
        """Whether any hook does something in ``method``."""
        return any(getattr(type(hook), method) is not getattr(Hook, method) for hook in self._hooks)

    def call(self, method: str, *args: Any) -> None:
        """Call ``method`` of every hook."""
        for hook in self._hooks:
            try:
                getattr(hook, method)(*args)
            except Exception:
                if self._strict:
                    raise
                if id(hook) not in self._reported:
                    self._reported.add(id(hook))
                    _logger.warning("%s failed; the training goes on without it", type(hook).__name__, exc_info=True)
