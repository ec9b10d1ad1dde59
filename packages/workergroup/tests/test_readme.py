"""The README and the docstrings say what is true: their lines run."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import kapell.workergroup

MODULES = [module.name for module in pkgutil.iter_modules(kapell.workergroup.__path__)]


def test_each_line_of_the_readme_runs():
    options = doctest.ELLIPSIS
    done = doctest.testfile(str(Path(__file__).parents[1] / "README.md"), module_relative=False, optionflags=options)
    assert done.attempted > 30
    assert done.failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_each_doctest_runs(name):
    assert doctest.testmod(importlib.import_module(f"kapell.workergroup.{name}")).failed == 0
