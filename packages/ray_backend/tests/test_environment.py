"""Workers run in the driver's own environment, also under `uv run`."""

import os
import subprocess
import sys

import pytest

# `uv run` is recognised by the command line of an ancestor process, so a program of that name stands for it here.
PROGRAM = """
import os, sys
from kapell.ray_backend import ensure_ray
import ray
ensure_ray(address="local")
print(ray.get(ray.remote(lambda: sys.executable).options(num_cpus=0).remote()))
ray.shutdown()
"""


@pytest.mark.timeout(180)
def test_workers_of_a_program_under_uv_run_use_its_interpreter(tmp_path):
    uv = tmp_path / "uv"
    uv.symlink_to("/bin/bash")
    script = tmp_path / "run"
    script.write_text(f'"{sys.executable}" -c "$PROGRAM"\n')
    environment = {**os.environ, "PROGRAM": PROGRAM}
    environment.pop("RAY_ENABLE_UV_RUN_RUNTIME_ENV", None)
    done = subprocess.run(
        [uv, "run"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=150
    )
    assert done.stdout.splitlines()[-1] == sys.executable


def test_what_the_user_chose_for_uv_run_stays():
    program = "import os, kapell.ray_backend; print(os.environ['RAY_ENABLE_UV_RUN_RUNTIME_ENV'])"
    for chosen, expected in ((None, "0"), ("1", "1")):
        environment = {**os.environ, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": chosen or ""}
        if chosen is None:
            del environment["RAY_ENABLE_UV_RUN_RUNTIME_ENV"]
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == [expected]
