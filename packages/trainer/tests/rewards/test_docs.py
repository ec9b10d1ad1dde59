"""The README's section on rewards, and the docstrings of its modules."""

import doctest
import importlib
import re
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
MODULES = ["sandbox", "code_reward", "reward_functions"]


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
def test_the_examples_of_the_readme_run():
    section = README.partition("## Rewards")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_are_right(name):
    result = doctest.testmod(importlib.import_module(f"kapell.trainer.{name}"))
    assert result.attempted
    assert not result.failed
