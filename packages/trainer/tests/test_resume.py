"""N steps, kill, resume and M steps are N+M steps, bit for bit; and what cannot be gone on with says why."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).with_name("resume_runs.py")
resume_runs = SimpleNamespace(**runpy.run_path(str(SCRIPT)))

VARIANTS = {
    "grpo": ["trainer.max_ckpt_to_keep=1", "trainer.keep_best=val/exact_match", "actor_rollout_ref.actor.ppo_epochs=3"],
    "ppo": [
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=20",
        "trainer.n_gpus_per_node=2",
        "trainer.critic_warmup=1",
        "actor_rollout_ref.actor.policy_loss.loss_mode=noisy_loss:noisy",
    ],
}
MOMENTS = {
    "grpo": [
        ["line", 3, 0],
        ["before", 4, 0],
        ["line", 4, 0],
        *(["save", 4, amount] for amount in range(0, 60, 9)),
        ["time", 4, 2],
        ["time", 4, 11],
    ],
    "ppo": [["before", 2, 0], ["line", 5, 0], ["save", 4, 30], ["save", 2, 5]],
}
MEASURED = ("timing_s/", "perf/throughput", "perf/time_per_step")


def records(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in lines]


def states(folder):
    """Checksums of weights, optimizers, random states, and of all else that a checkpoint holds but for seconds."""
    files = json.loads((folder / "checkpoint.json").read_text())["files"]
    return {name: record["crc32"] for name, record in files.items() if name not in ("trainer.json", "report.json")}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with data, and files that need not outlive a crash of the machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    resume_runs.write_files(tmp_path)
    return tmp_path


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_killed_and_resumed_run_is_the_uninterrupted_one_bit_for_bit(here, variant):
    overrides, moments = VARIANTS[variant], MOMENTS[variant]
    arguments = [str(here), json.dumps(overrides), json.dumps(moments)]
    killed = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)
    assert killed.returncode == 0, killed.stdout + killed.stderr
    whole = here / "whole"
    resume_runs.run(whole, overrides)
    for number, moment in enumerate(moments):
        folder = here / f"run{number}"
        resume_runs.run(folder, overrides)
        assert records(folder) == records(whole), moment
        assert (folder / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes(), moment
        assert states(folder / "global_step_6") == states(whole / "global_step_6"), moment
        weights = [path / "model" / "model.safetensors" for path in (folder, whole)]
        assert weights[0].read_bytes() == weights[1].read_bytes(), moment
        shutil.rmtree(folder)
