"""The orchestrating side of `benchmarks.serve`: one process per environment, asked for one round at a time."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["Server", "ServerError"]

_ROOT = Path(__file__).parent.parent
_ENVIRONMENT = {
    # Each process computes on one core unless its contender says otherwise, as workers that share a machine do.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    # Ray's own hook for `uv run` would start the workers of a peer in this project's environment.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONWARNINGS": "ignore",
}


class ServerError(RuntimeError):
    """A contender failed, or its process ended or hung."""


class Server:
    """A process with contenders."""

    def __init__(self, python: str, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=_ROOT,
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(_ROOT)},
            start_new_session=True,  # Ctrl-C reaches the orchestrator, which then ends the servers in order
        )
        self._log_path = log
        self._selector = selectors.DefaultSelector()
        assert self._process.stdout is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def ask(self, do: str, *, timeout: float = 120.0, **request: Any) -> Any:
        """Send a request and wait for its answer. Raises `ServerError`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ServerError(f"the process has ended; see {self._log_path}") from None
        if not self._selector.select(timeout):
            self._process.kill()
            raise ServerError(f"{do} took longer than {timeout:.0f} s; the process was ended")
        line = self._process.stdout.readline()
        if not line:
            raise ServerError(f"the process ended during {do}; see {self._log_path}")
        answer = json.loads(line)
        if "error" in answer:
            self._log.write(answer["traceback"])
            self._log.flush()
            raise ServerError(answer["error"])
        return answer["value"]

    def close(self) -> None:
        """End the process, politely at first, so that a Ray session ends with it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._selector.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()
