"""The measuring side: holds contenders in one process and runs their rounds on request, over stdin and stdout.

Standard library only, since it runs in every peer's environment. A contender is a class; ``prepare(**size)`` makes its
data, ``round()`` runs one measured round and returns numbers by metric, ``close()`` ends what it started.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from typing import Any


class Contenders:
    def __init__(self) -> None:
        self._open: dict[str, Any] = {}

    def open(self, name: str, target: str, options: dict[str, Any]) -> None:
        module, _, attribute = target.partition(":")
        self._open[name] = getattr(importlib.import_module(module), attribute)(**options)

    def prepare(self, name: str, size: dict[str, Any]) -> None:
        self._open[name].prepare(**size)

    def round(self, name: str) -> dict[str, float]:
        return self._open[name].round()

    def close(self, name: str) -> None:
        close = getattr(self._open.pop(name), "close", None)
        if close is not None:
            close()

    def versions(self, packages: list[str]) -> dict[str, str]:
        found = {}
        for package in packages:
            try:
                found[package] = version(package)
            except PackageNotFoundError:
                continue
        return found


def main() -> None:
    # What libraries print must not disturb the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    contenders = Contenders()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": getattr(contenders, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
