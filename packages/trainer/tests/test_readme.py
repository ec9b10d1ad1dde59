"""The README's loop runs, and docstrings say what happens."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
MODULES = [
    "config_load",
    "data",
    "micro_batches",
    "optimizers",
    "run_folder",
    "sampler",
    "updates",
    "tasks.reverse_digits",
    "tokenizer",
]


def test_the_loop_in_the_readme_trains():
    section = README.read_text().partition("## Write your own loop")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names = {}
    exec(code, names)
    assert isinstance(names["loss"], float)
    assert names["batch"].column("advantages").shape == (32, 3)


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_show_what_happens(module):
    result = doctest.testmod(importlib.import_module(f"kapell.trainer.{module}"))
    assert result.attempted
    assert not result.failed
