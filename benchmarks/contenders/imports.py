"""Import times, each in a fresh interpreter of the contender's environment."""

from __future__ import annotations

import json
import subprocess
import sys

_PROGRAM = """
import json, sys, time
began = time.perf_counter()
{statement}
seconds = time.perf_counter() - began
heavy = sorted({{"torch", "ray", "numpy"}} & set(sys.modules))
print(json.dumps({{"seconds": seconds, "heavy": len(heavy), "modules": len(sys.modules)}}))
"""


class Import:
    """Runs an import statement."""

    def __init__(self, statement: str) -> None:
        self._program = _PROGRAM.format(statement=statement)

    def prepare(self) -> None:
        self.round()  # files into the page cache, bytecode onto the disk

    def round(self) -> dict[str, float]:
        done = subprocess.run([sys.executable, "-c", self._program], capture_output=True, text=True, check=True)
        numbers = json.loads(done.stdout.splitlines()[-1])
        return {"time": numbers["seconds"], "heavy libraries": numbers["heavy"]}
