"""Scores rows by a service over HTTP, in batches, with retries; a service that fails is an error and never a zero.

The service gets ``POST`` requests with JSON ``{"rows": [...]}``, each row an object with ``data_source``,
``solution_str``, ``ground_truth`` and ``extra_info``. It answers ``{"scores": [...]}``, one entry per row: a number, an
object with ``score`` and anything worth logging, or ``{"error": "why"}`` for a row that it cannot score.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import requests

from .config_checks import require_positive
from .http_service import HttpService, ServiceError
from .reward import RewardError
from .reward_functions import Outcome, RewardRows, read_score
from .run_folder import json_value

__all__ = ["RemoteReward", "RemoteRewardError"]


class RemoteRewardError(RewardError):
    """A reward service did not score some rows; the message names its address, what it answered, and the rows."""


@dataclass(frozen=True, kw_only=True)
class RemoteReward(HttpService):
    """A reward over HTTP."""

    batch_size: int = 64
    """Rows per request."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "batch_size")

    def __call__(self, rows: RewardRows) -> Iterator[Outcome]:
        """The outcomes, in order."""
        size, total = self.batch_size, len(rows)
        spans = [range(start, min(start + size, total)) for start in range(0, total, size)]
        try:
            session = self.session()
        except ServiceError as error:
            raise RemoteRewardError(str(error)) from None
        with session, ThreadPoolExecutor(self.concurrency) as pool:
            try:
                for outcomes in pool.map(lambda span: self._score(session, rows, span), spans):
                    yield from outcomes
            finally:
                pool.shutdown(cancel_futures=True)

    def _score(self, session: requests.Session, rows: RewardRows, span: range) -> list[Outcome]:
        names = ("data_source", "solution_str", "ground_truth", "extra_info")
        body = {"rows": [json_value(dict(zip(names, rows.arguments(row), strict=True))) for row in span]}
        try:
            scores = self._scores_of(self.post(session, body), len(span))
        except ServiceError as error:
            sources = ", ".join(sorted({rows.data_sources[row] for row in span}))
            failure = RemoteRewardError(f"reward: {error}, for rows {span[0]} to {span[-1]} (data sources: {sources})")
            failure.__cause__ = error
            return [failure] * len(span)
        return [self._outcome(score, rows.place(row)) for row, score in zip(span, scores, strict=True)]

    def _scores_of(self, answer: Any, num_rows: int) -> list[Any]:
        if not isinstance(answer, Mapping) or not isinstance(answer.get("scores"), list):
            raise ServiceError(f"{self.url} answered without a list under 'scores': {str(answer)[:300]!r}")
        scores = answer["scores"]
        if len(scores) != num_rows:
            raise ServiceError(f"{self.url} answered {len(scores)} scores for {num_rows} rows")
        return scores

    def _outcome(self, score: Any, place: str) -> Outcome:
        if isinstance(score, Mapping) and "score" not in score and "error" in score:
            return RemoteRewardError(f"{self.url} could not score {place}: {score['error']}")
        try:
            return read_score(score, place)
        except RewardError as error:
            return RemoteRewardError(f"{self.url}: {error}")
