"""What the documentation says is run."""

import doctest
import importlib
import pkgutil
import warnings
from pathlib import Path

import pytest

import kapell.protocol

README = Path(__file__).parents[1] / "README.md"
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
MODULES = ["kapell.protocol"]
MODULES += [module.name for module in pkgutil.walk_packages(kapell.protocol.__path__, "kapell.protocol.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    warnings.simplefilter("ignore", UserWarning)
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=OPTIONS).failed == 0


def test_examples_in_the_readme_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = README.read_text()
    assert doctest.testfile(str(README), module_relative=False, optionflags=OPTIONS).failed == 0
    for name in kapell.protocol.__all__:
        assert name in text, f"the README does not show {name}"


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_is_public(name):
    module = importlib.import_module(name)
    assert module.__doc__
    assert all(hasattr(module, public) for public in module.__all__)
