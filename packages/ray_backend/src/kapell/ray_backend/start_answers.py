"""Waiting for the workers of a group to start: all of them, or the first failures, or a limit."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from kapell.workergroup import FAILURE_GRACE_SECONDS, failed_start

from .failures import lost_worker, own_error

__all__ = ["StartTimeoutError", "gather_start"]

logger = logging.getLogger(__name__)

_REPORT_EVERY = 30.0  # seconds between two lines about workers that are slow to start


class StartTimeoutError(TimeoutError):
    """The workers' processes or constructors did not finish in time; those that did were ended."""

    def __init__(self, role: str, stage: str, waited: float, ranks: Sequence[int]) -> None:
        super().__init__(role, stage, waited, tuple(ranks))
        self.role = role
        self.stage = stage
        self.waited = waited
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[Any, ...]:  # OSError, a base, keeps three of four arguments
        return type(self), (self.role, self.stage, self.waited, self.ranks), self.__dict__

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return (
            f"{self.role}: {self.stage} of rank {ranks} is not done after {self.waited:.0f} s; look at the "
            f"workers' logs, or raise start_timeout"
        )


def gather_start(
    role: str,
    stage: str,
    refs: Sequence[ray.ObjectRef],
    deadline: float,
    *,
    first_rank: int,
    world_size: int,
) -> list[Any]:
    """The answers of ranks ``first_rank`` and following, in order.

    Raises `WorkerFailedError` with all that failed, shortly after the first one did, or `StartTimeoutError`.
    """
    ranks = {ref: first_rank + position for position, ref in enumerate(refs)}
    answers: dict[int, Any] = {}
    failures: dict[int, Exception] = {}
    began = reported = time.monotonic()
    pending = list(refs)
    while pending:
        limit = min(deadline, reported + _REPORT_EVERY) - time.monotonic()
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, limit))
        for ref in done:
            try:
                answers[ranks[ref]] = ray.get(ref)
            except RayTaskError as error:
                failures[ranks[ref]] = own_error(error)
            except RayError as error:
                failures[ranks[ref]] = lost_worker(error, "")
            if failures:
                deadline = min(deadline, time.monotonic() + FAILURE_GRACE_SECONDS)
        now = time.monotonic()
        if now >= deadline:
            break
        if pending and now - reported >= _REPORT_EVERY:
            reported = now
            late = [ranks[ref] for ref in pending]
            logger.warning("%s: waiting %.0f s for the %s of ranks %s", role, now - began, stage, late)
    if failures:
        raise failed_start(role, world_size, failures)
    if pending:
        raise StartTimeoutError(role, stage, time.monotonic() - began, [ranks[ref] for ref in pending])
    return [answers[ranks[ref]] for ref in refs]
