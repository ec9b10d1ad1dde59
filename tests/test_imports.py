"""Importing a layer brings in only what the layer declares."""

import subprocess
import sys

import pytest

HEAVY = ("numpy", "torch", "tensordict", "ray", "transformers")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("kapell.decorators", HEAVY),
        ("kapell.workergroup", HEAVY),
        ("kapell.protocol", ("ray", "transformers")),
        ("kapell.ray_backend", ("transformers",)),
        ("kapell.trainer", ("ray", "transformers")),
        ("kapell.trainer.algorithms", ("ray", "transformers")),
    ],
)
def test_importing_a_layer_leaves_the_others_dependencies_alone(module, absent):
    code = f"import sys, {module}; print(*[name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
