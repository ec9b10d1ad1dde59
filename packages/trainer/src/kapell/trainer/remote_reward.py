"""Scores rows by a service over HTTP, in batches, with retries; a service that fails is an error and never a zero.

The service gets ``POST`` requests with JSON ``{"rows": [...]}``, each row an object with ``data_source``,
``solution_str``, ``ground_truth`` and ``extra_info``. It answers ``{"scores": [...]}``, one entry per row: a number, an
object with ``score`` and anything worth logging, or ``{"error": "why"}`` for a row that it cannot score.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import requests

from .reward import RewardError
from .reward_functions import Outcome, RewardRows, read_score
from .run_folder import json_value

__all__ = ["RemoteReward", "RemoteRewardError"]

_RETRIED = {408, 425, 429, 500, 502, 503, 504}  # the service may answer these differently later
_MAX_BACKOFF = 60.0  # seconds; a service that asks for a longer pause is as good as down
_SHOWN_BODY = 300


class RemoteRewardError(RewardError):
    """A reward service did not score some rows; the message names its address, what it answered, and the rows."""


@dataclass(frozen=True, kw_only=True)
class RemoteReward:
    """A reward over HTTP."""

    url: str
    """Where to post."""
    timeout: float = 60.0
    """Seconds without a byte after which a request counts as failed."""
    batch_size: int = 64
    """Rows per request."""
    concurrency: int = 4
    """Requests at once."""
    retries: int = 3
    """Further attempts after a failed connection, a timeout, or a status such as 429 and 503."""
    backoff: float = 0.5
    """Seconds before the first of them; doubled each time. ``Retry-After`` of the service wins."""
    api_key_env: str | None = None
    """Environment variable with a bearer token, which is read when a batch is sent and stored nowhere."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must start with http:// or https://, got {self.url!r}")
        for name in ("timeout", "batch_size", "concurrency"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("retries", "backoff"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    def __call__(self, rows: RewardRows) -> Iterator[Outcome]:
        """The outcomes, in order."""
        size, total = self.batch_size, len(rows)
        spans = [range(start, min(start + size, total)) for start in range(0, total, size)]
        with requests.Session() as session, ThreadPoolExecutor(self.concurrency) as pool:
            session.headers.update(self._headers())
            try:
                for outcomes in pool.map(lambda span: self._score(session, rows, span), spans):
                    yield from outcomes
            finally:
                pool.shutdown(cancel_futures=True)

    def _headers(self) -> Mapping[str, str]:
        if self.api_key_env is None:
            return {}
        if not (key := os.environ.get(self.api_key_env)):
            raise RemoteRewardError(f"environment variable {self.api_key_env}, the key of {self.url}, is not set")
        return {"Authorization": f"Bearer {key}"}

    def _score(self, session: requests.Session, rows: RewardRows, span: range) -> list[Outcome]:
        names = ("data_source", "solution_str", "ground_truth", "extra_info")
        body = {"rows": [json_value(dict(zip(names, rows.arguments(row), strict=True))) for row in span]}
        try:
            scores = self._scores_of(self._post(session, body), len(span))
        except RemoteRewardError as error:
            sources = ", ".join(sorted({rows.data_sources[row] for row in span}))
            failure = RemoteRewardError(f"{error}, for rows {span[0]} to {span[-1]} (data sources: {sources})")
            failure.__cause__ = error.__cause__
            return [failure] * len(span)
        return [self._outcome(score, rows.place(row)) for row, score in zip(span, scores, strict=True)]

    def _post(self, session: requests.Session, body: Mapping[str, Any]) -> requests.Response:
        """The service's answer with a good status, after as many attempts as it takes or are allowed."""
        attempt = 0
        while True:
            attempt += 1
            pause = self.backoff * 2 ** (attempt - 1)
            try:
                response = session.post(self.url, json=body, timeout=self.timeout)
            except requests.RequestException as error:
                text = f"no answer from the reward service {self.url} in {attempt} attempts: {error}"
                failure = RemoteRewardError(text)
                failure.__cause__ = error
                final = not isinstance(error, requests.ConnectionError | requests.Timeout)
            else:
                if response.ok:
                    return response
                status = f"status {response.status_code} {response.reason}"
                failure = self._error(response, f"{status} in {attempt} attempts")
                final = response.status_code not in _RETRIED
                pause = max(pause, _seconds(response.headers.get("Retry-After")))
            if final or attempt > self.retries or pause > _MAX_BACKOFF:
                raise failure
            time.sleep(pause)

    def _scores_of(self, response: requests.Response, num_rows: int) -> list[Any]:
        try:
            scores = response.json()["scores"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._error(response, "status 200 without JSON of the form {'scores': [...]}") from error
        if not isinstance(scores, list) or len(scores) != num_rows:
            count = len(scores) if isinstance(scores, list) else type(scores).__name__
            raise self._error(response, f"status 200 with {count} scores for {num_rows} rows")
        return scores

    def _error(self, response: requests.Response, answered: str) -> RemoteRewardError:
        body = response.text[:_SHOWN_BODY]
        return RemoteRewardError(f"the reward service {self.url} answered {answered}: {body!r}")

    def _outcome(self, score: Any, place: str) -> Outcome:
        if isinstance(score, Mapping) and "score" not in score and "error" in score:
            return RemoteRewardError(f"the reward service {self.url} could not score {place}: {score['error']}")
        try:
            return read_score(score, place)
        except RewardError as error:
            return RemoteRewardError(f"the reward service {self.url}: {error}")


def _seconds(retry_after: str | None) -> float:
    try:
        return float(retry_after or 0)
    except ValueError:  # a date: rare, and our own pause does
        return 0.0
