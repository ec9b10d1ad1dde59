"""Posts JSON to a service over HTTP, with retries; what fails is an error that names address, status and answer."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import requests

from .config_checks import require_not_negative, require_positive

__all__ = ["HttpService", "ServiceError"]

_BROKEN = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)
_RETRIED = {408, 425, 429, 500, 502, 503, 504}  # the service may answer these differently later
_MAX_PAUSE = 60.0  # seconds; a service that asks for a longer pause is as good as down
_SHOWN_BODY = 300


class ServiceError(RuntimeError):
    """A service did not answer, or not with what was asked for."""


@dataclass(frozen=True, kw_only=True)
class HttpService:
    """Where and how requests are posted."""

    url: str
    """The address."""
    timeout: float = 60.0
    """Seconds without a byte after which a request counts as failed."""
    concurrency: int = 4
    """Requests at once."""
    retries: int = 3
    """Further attempts after a failed connection, a timeout, or a status such as 429 and 503."""
    backoff: float = 0.5
    """Seconds before the first of them; doubled each time. ``Retry-After`` of the service wins."""
    api_key_env: str | None = None
    """Environment variable with a bearer token, which is read when requests are sent and stored nowhere."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must start with http:// or https://, got {self.url!r}")
        require_positive(self, "timeout", "concurrency")
        require_not_negative(self, "retries", "backoff")

    def session(self) -> requests.Session:
        """Connections for a number of requests; to be closed. Raises `ServiceError` where the key is missing."""
        session = requests.Session()
        if self.api_key_env is not None:
            if not (key := os.environ.get(self.api_key_env)):
                raise ServiceError(f"environment variable {self.api_key_env}, the key of {self.url}, is not set")
            session.headers["Authorization"] = f"Bearer {key}"
        return session

    def post(self, session: requests.Session, body: Mapping[str, Any], path: str = "") -> Any:
        """The JSON that the service answers with a good status, after as many attempts as that takes or are allowed."""
        url = f"{self.url.rstrip('/')}{path}" if path else self.url
        attempt = 0
        while True:
            attempt += 1
            pause = self.backoff * 2 ** (attempt - 1)
            try:
                response = session.post(url, json=body, timeout=self.timeout)
            except requests.RequestException as error:
                failure = ServiceError(f"no answer from {url} in {attempt} attempts: {error}")
                final = not isinstance(error, _BROKEN)
            else:
                if response.ok:
                    return _json_of(response)
                status = f"status {response.status_code} {response.reason} in {attempt} attempts"
                failure = ServiceError(f"{url} answered {status}: {response.text[:_SHOWN_BODY]!r}")
                final = response.status_code not in _RETRIED
                pause = max(pause, _seconds(response.headers.get("Retry-After")))
            if final or attempt > self.retries or pause > _MAX_PAUSE:
                raise failure
            time.sleep(pause)


def _json_of(response: requests.Response) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise ServiceError(f"{response.url} answered no JSON: {response.text[:_SHOWN_BODY]!r}") from error


def _seconds(retry_after: str | None) -> float:
    try:
        return float(retry_after or 0)
    except ValueError:  # a date: rare, and our own pause does
        return 0.0
