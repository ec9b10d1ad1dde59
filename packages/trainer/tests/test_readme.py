"""The README's loop runs, and docstrings say what happens."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

from kapell.trainer import cli
from kapell.trainer.config_load import load_config

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


def test_the_snippets_of_the_trainers_page_run():
    page = README.parents[2] / "docs" / "trainer.md"
    if not page.is_file():
        pytest.skip("the package is tested without the workspace's docs")
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 3
    names = {}
    for block in blocks:
        exec(block, names)
    assert names["reinforce_step"].__doc__


def test_what_the_trainers_page_says_to_read_is_there_and_is_short():
    page = README.parents[2] / "docs" / "trainer.md"
    if not page.is_file():
        pytest.skip("the package is tested without the workspace's docs")
    section = page.read_text(encoding="utf-8").partition("## Read it")[2].partition("All else")[0]
    modules = re.findall(r"`([a-z_/]+\.py)`", section)
    assert len(modules) > 10
    source = Path(str(importlib.util.find_spec("kapell.trainer.steps").origin)).parent
    assert sum(len((source / name).read_text(encoding="utf-8").splitlines()) for name in modules) < 2_000


def test_the_trainers_page_names_keys_and_commands_that_exist():
    page = README.parents[2] / "docs" / "trainer.md"
    if not page.is_file():
        pytest.skip("the package is tested without the workspace's docs")
    text = re.sub(r"`[a-z_/]+\.py`", "", page.read_text(encoding="utf-8"))
    known = {key for key, _, _ in load_config().leaves()}
    groups = {key.rpartition(".")[0] for key in known} | {key.partition(".")[0] for key in known}
    words = set(
        re.findall(r"\b((?:data|algorithm|actor_rollout_ref|critic|reward|trainer|backend)\.[a-z_.]+[a-z_])", text)
    )
    words = {word for word in words if not word.startswith(("reward.terms.", "trainer.steps", "trainer.doctor"))}
    unknown = {word for word in words if word not in known | groups}
    assert not {word for word in unknown if f"kapell.{word}" not in text}
    commands = set(re.findall(r"kapell ([a-z]+)", text))
    assert commands <= {module.__name__.rpartition(".")[2].replace("show_config", "config") for module in cli._COMMANDS}
