"""Training loops let through one step at a time, so that contenders can alternate.

Each runs on the main thread of a process of its own, as in its users' programs: on another thread, glibc's memory and
whatever needs signals would be slower.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

__all__ = ["PacedContender", "StepDone"]


class StepDone(Protocol):
    """Called by a loop after each step; waits until the next step may begin."""

    def __call__(self, measure: Callable[[], Mapping[str, float]] = dict, /) -> None:
        """``measure`` tells what else is known of the step; its time is not the step's."""


class PacedContender:
    """A loop function ``module:function``, called with ``step_done`` and the options and size as keywords."""

    def __init__(self, loop: str, **options: Any) -> None:
        self._loop = loop
        self._options = options
        self._process: subprocess.Popen[str] | None = None

    def prepare(self, **size: int) -> None:
        self.close()
        arguments = json.dumps({**self._options, **size})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.contenders.paced", self._loop, arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.round()  # starts workers, makes optimizer states

    def round(self) -> dict[str, float]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the training loop ended; see the log")
        return json.loads(line)

    def close(self) -> None:
        """End the loop after its last step."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(target: str, arguments: str) -> None:
    """Run the loop; one line in lets one step through, one line out tells what it took."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, _, name = target.partition(":")
    began = 0.0

    def wait() -> None:
        nonlocal began
        if not sys.stdin.readline():
            raise SystemExit  # unwinds the loop, so that it ends its workers
        began = time.perf_counter()

    def step_done(measure: Callable[[], Mapping[str, float]] = dict, /) -> None:
        seconds = time.perf_counter() - began
        answers.write(json.dumps({"step": seconds, **measure()}) + "\n")
        answers.flush()
        wait()

    loop = getattr(importlib.import_module(module), name)
    wait()
    loop(step_done, **json.loads(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
