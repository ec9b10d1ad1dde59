"""A run on Ray that is killed and started again is the uninterrupted one, bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kapell.trainer.build import prepare, train
from kapell.trainer.config_load import load_config
from kapell.trainer.run_folder import RunFiles
from kapell.workergroup import load_backend

SMALL = [
    "backend=ray",
    "algorithm.adv_estimator=gae",
    "trainer.n_gpus_per_node=2",
    "trainer.total_training_steps=6",
    "trainer.save_freq=2",
    "trainer.test_freq=-1",
    "data.train_batch_size=6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.model.hidden_size=16",
]
MEASURED = ("timing_s/", "perf/throughput", "perf/time_per_step")


def lines(folder):
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in records]


def run(folder):
    torch.set_num_threads(1)
    train(prepare(load_config(overrides=SMALL).config, folder), folder, hooks=[RunFiles(folder)])


def killed_run(folder, after):
    """``kapell train``, killed with all its processes once the step ``after`` has a line."""
    command = [Path(sys.executable).with_name("kapell"), "train", f"trainer.default_local_dir={folder}", *SMALL]
    own_ray = "backend.options.address=local"
    long = "trainer.total_training_steps=100000"  # it must not end before it is killed
    process = subprocess.Popen([*command, own_ray, long], stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 200
    try:
        while not (folder / "metrics.jsonl").exists() or (folder / "metrics.jsonl").read_text().count("\n") < after:
            assert process.poll() is None, f"the run ended with {process.returncode}"
            assert time.monotonic() < deadline, "the run did not come to its steps"
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="kills a group of processes")
def test_a_killed_run_on_ray_goes_on_as_if_it_had_not_been_killed(tmp_path):
    killed_run(tmp_path / "killed", after=3)
    steps = sorted(int(path.name.rpartition("_")[2]) for path in (tmp_path / "killed").glob("global_step_*"))
    assert steps[0] == 2
    for later in steps:
        if later > 4:  # it went on for a moment after its third step
            (tmp_path / "killed" / f"global_step_{later}").rename(tmp_path / f"later_{later}")
    with load_backend("ray")() as backend:
        backend.start()
        run(tmp_path / "killed")
        run(tmp_path / "whole")
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")
    files = [
        json.loads((tmp_path / name / "global_step_6" / "checkpoint.json").read_text())["files"]
        for name in ("killed", "whole")
    ]
    # Python's and NumPy's own generators, which rank_N holds too, begin differently in each process.
    state = [name for name in files[0] if name.startswith(("actor/", "critic/", "data")) and "rank_" not in name]
    assert {"actor/model.safetensors", "critic/optimizer.safetensors"} <= set(state)
    assert [files[0][name] for name in state] == [files[1][name] for name in state]
    assert {"actor/rank_0.safetensors", "actor/rank_1.safetensors"} <= files[0].keys()
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("killed", "whole")]
    assert weights[0] == weights[1]
