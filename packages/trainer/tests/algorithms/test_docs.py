"""The README's tables, the docstrings, and what importing the kernels brings in."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kapell.trainer.algorithms as algorithms
from kapell.trainer.algorithms import Aggregation, KLKind, advantage_estimators, policy_losses

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
MODULES = [f"{algorithms.__name__}.{module.name}" for module in pkgutil.iter_modules(algorithms.__path__)]


def table(first_column):
    """Rows of the table whose header starts so, each as its cells."""
    lines = README.partition(f"\n| {first_column} |")[2].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


@pytest.mark.parametrize(
    ("title", "names", "needs_source"),
    [
        ("advantage", advantage_estimators, True),
        ("policy loss", policy_losses, True),
        ("aggregation", Aggregation, False),
        ("KL estimator", KLKind, True),
    ],
)
def test_tables_list_exactly_what_there_is(title, names, needs_source):
    rows = table(title)
    assert sorted(row[0].strip("`") for row in rows) == sorted(str(name) for name in names)
    for name, formula, source, key in rows:
        assert formula
        assert source or not needs_source
        assert key.endswith(f"={name.strip('`')}`")


def test_the_example_of_the_readme_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README.partition("## Algorithms")[2].partition("\n## ")[0], re.DOTALL)
    names = {}
    exec(code, names)
    assert names["batch"]["log_probs"].grad.any()


def test_import_leaves_transformers_and_ray_out():
    code = (
        "import sys, kapell.trainer.algorithms; "
        "print([name for name in ('transformers', 'ray', 'tensordict') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_are_true(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0


@pytest.mark.parametrize("module", MODULES)
def test_public_names_of_each_module_are_in_the_front_door(module):
    internal = {
        "as_mask",
        "clip_bounds",
        "group_rows",
        "grpo_scores",
        "Groups",
        "limited_log_ratio",
        "parse_threshold",
        "select_valid",
        "Uid",
        "whiten_in_scope",
        "widen",
    }  # shared between modules of this package only
    public = set(importlib.import_module(module).__all__)
    assert public - internal <= set(algorithms.__all__)


def test_the_front_door_has_what_it_lists():
    assert all(hasattr(algorithms, name) for name in algorithms.__all__)


@pytest.mark.parametrize("registry", [advantage_estimators, policy_losses])
def test_every_function_says_its_formula_and_source(registry):
    for name in registry:
        text = registry.get(name).__doc__
        assert text, name
        assert re.search(r"\d{4}\.\d{5}|JMLR|Williams", text), f"{name} names no paper"
