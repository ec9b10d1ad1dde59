"""What a type checker makes of labelled methods: one file it accepts, and one in which it marks each wrong line."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "typing"


@pytest.fixture(scope="module")
def ty():
    beside = Path(sys.executable).with_name("ty")
    found = str(beside) if beside.exists() else shutil.which("ty")
    assert found, "the type checker ty belongs to the test group"

    def check(name):
        command = [found, "check", "--python", sys.prefix, "--output-format", "concise", str(FOLDER / name)]
        return subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=False)

    return check


def test_the_checker_accepts_right_use(ty):
    done = ty("accepted.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_checker_rejects_each_wrong_use(ty):
    done = ty("rejected.py")
    marked = {number for number, line in enumerate(_lines(), start=1) if line.rstrip().endswith("# wrong")}
    found = {int(number) for number in re.findall(r"rejected\.py:(\d+):", done.stdout)}
    assert found == marked, done.stdout


def _lines():
    return (FOLDER / "rejected.py").read_text().splitlines()
