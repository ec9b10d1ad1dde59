"""`group.as_(WorkerClass)` gives type checkers the worker's signatures."""

import subprocess
import sys

import pytest

pytest.importorskip("ty")

PROGRAM = """
from typing import assert_type

from kapell.decorators import Dispatch, register
from kapell.workergroup import ClassWithInitArgs, LocalWorkerGroup, ResourcePool, Worker


class Actor(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update(self, rows: list[int], scale: float = 1.0) -> list[float]:
        return [row * scale for row in rows]


group = LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Actor))
assert_type(group.as_(Actor), Actor)
assert_type(group.as_(Actor).update([1, 2]), list[float])
{line}
"""


def _check(tmp_path, line=""):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(line=line))
    command = [sys.executable, "-m", "ty", "check", "--python", sys.prefix, "--output-format", "concise", str(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)


def test_as_gives_the_workers_type(tmp_path):
    done = _check(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("group.as_(Actor).update('rows')", "invalid-argument-type"),
        ("group.as_(Actor).update([1], scal=2.0)", "unknown-argument"),
        ("group.as_(Actor).updat([1])", "no attribute `updat`"),
    ],
)
def test_wrong_calls_are_found(tmp_path, line, complaint):
    done = _check(tmp_path, line)
    assert done.returncode == 1
    assert complaint in done.stdout
