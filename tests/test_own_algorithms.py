"""An advantage estimator and a policy loss of the user's own, by import path, in Ray workers too."""

import json
import os
import subprocess
import sys

import pytest

MODULE = """
import os
import torch
from kapell.trainer.algorithms import TokenLosses, grpo

def halved(token_level_rewards, response_mask, uid, *, factor=0.5):
    advantages, returns, metrics = grpo(token_level_rewards, response_mask, uid)
    return factor * advantages, returns, metrics

def plain(log_probs, old_log_probs, advantages, response_mask, *, weight=1.0):
    in_driver = torch.full_like(log_probs, float(os.getpid() == int(os.environ["DRIVER_PID"])))
    return TokenLosses(-weight * advantages * (log_probs - old_log_probs).exp(), {"in_driver": in_driver})
"""
PROGRAM = "import os; os.environ['DRIVER_PID'] = str(os.getpid()); from kapell.trainer.cli import main; main()"


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_own_estimator_and_loss_run_by_import_path(tmp_path, backend):
    (tmp_path / "own_algorithms.py").write_text(MODULE)
    overrides = [
        "algorithm.adv_estimator=own_algorithms:halved",
        "algorithm.adv_options.factor=0.25",
        "actor_rollout_ref.actor.policy_loss.loss_mode=own_algorithms:plain",
        "actor_rollout_ref.actor.policy_loss.options.weight=2.0",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
        "trainer.n_gpus_per_node=1",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        f"backend={backend}",
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "train", *overrides],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    (name,) = [name for name in metrics if name.endswith("in_driver")]
    assert metrics[name] == (1.0 if backend == "local" else 0.0)
    assert abs(metrics["critic/advantages/max"]) < 0.25 * 3
