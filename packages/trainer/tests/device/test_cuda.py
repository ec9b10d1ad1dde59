"""A few steps on a real GPU, beside the same on the CPU."""

import json
import math

import pytest
import torch

from kapell.trainer.build import prepare, train
from kapell.trainer.config_load import load_config
from kapell.trainer.run_folder import RunFiles

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU that CUDA finds; test_device.py runs everywhere"
)
SMALL = [
    "backend=local",
    "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=3",
    "trainer.test_freq=3",
    "data.train_batch_size=8",
    "data.val_batch_size=50",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.model.hidden_size=32",
]


def run(folder, *overrides):
    prepared = prepare(load_config(overrides=[*SMALL, *overrides]).config, folder)
    train(prepared, folder, hooks=[RunFiles(folder)])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("overrides", [[], ["algorithm.adv_estimator=gae"]], ids=["grpo", "ppo"])
def test_a_run_on_cuda_gives_the_numbers_of_the_cpu_up_to_rounding(tmp_path, overrides):
    here = run(tmp_path / "cpu", *overrides)
    there = run(tmp_path / "cuda", *overrides, "trainer.device=cuda")
    for ours, others in zip(here, there, strict=True):
        for name in ours:
            if not name.startswith(("timing", "perf")):
                assert others[name] == pytest.approx(ours[name], rel=1e-2, abs=1e-3), name
    assert there[-1]["perf/max_memory_allocated_gb"] > 0.0


def test_bfloat16_and_a_checkpoint_work_on_cuda(tmp_path):
    options = ["trainer.device=cuda", "actor_rollout_ref.model.dtype=bfloat16", "trainer.save_freq=1"]
    run(tmp_path, *options, "trainer.total_training_steps=2")
    *_, last = run(tmp_path, *options)
    assert last["step"] == 3
    assert math.isfinite(last["actor/grad_norm"])
    assert last["rollout_corr/log_ppl_abs_diff"] < 0.1
