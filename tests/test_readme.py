"""What the README shows is what runs."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


def _example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_worker_in_the_readme_is_the_example_file():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert (ROOT / "examples" / "own_worker.py").read_text() in blocks


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_the_example_worker_scores_every_row_in_order(backend, capsys):
    scored = _example("own_worker").main(backend)
    assert torch.equal(scored.batch["scores"], torch.tensor([3.0, 11.0, 19.0, 27.0, 35.0]))
    printed = capsys.readouterr().out
    assert "rank 1 of 2 now scales by 2.0" in printed
