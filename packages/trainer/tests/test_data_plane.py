"""Columns by reference: the same numbers as by value, and the controller fetches only what it reads."""

import json

import pytest
import torch
from safetensors.torch import load_file

from kapell.protocol import StoredBatch
from kapell.trainer.build import prepare, train
from kapell.trainer.config_load import load_config
from kapell.trainer.hooks import Hook
from kapell.trainer.plan import plan_run
from kapell.trainer.run_folder import RunFiles

ACTOR = "actor_rollout_ref.actor"
SMALL = [
    "backend=local",
    "trainer.n_gpus_per_node=2",
    "trainer.total_training_steps=2",
    "trainer.test_freq=2",
    "data.train_batch_size=5",
    f"{ACTOR}.ppo_mini_batch_size=3",
    f"{ACTOR}.ppo_epochs=2",
    "actor_rollout_ref.rollout.n=3",
    "actor_rollout_ref.model.hidden_size=16",
]
VARIANTS = {
    "grpo": [f"{ACTOR}.use_kl_loss=true"],
    "ppo": ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"],
    "remax": ["algorithm.adv_estimator=remax"],
    "optimal token baseline": ["algorithm.adv_estimator=optimal_token_baseline"],
    "sampler's log-probabilities": ["algorithm.rollout_correction.bypass_mode=true"],
    "corrected": [
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.9_1.1",
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.norm_scope=mini-batch",
    ],
    "unbalanced": ["trainer.balance_batch=false"],
}


def run(folder, *overrides, hooks=()):
    folder.mkdir()
    config = load_config(overrides=[*SMALL, *overrides]).config
    train(prepare(config, folder), folder, hooks=[RunFiles(folder), *hooks])
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("timing_s/", "perf/throughput", "perf/time_per_step")
    return [{name: value for name, value in record.items() if not name.startswith(timed)} for record in records]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_by_reference_is_the_run_by_value(tmp_path, variant):
    by_value, by_reference = (
        run(tmp_path / plane, *VARIANTS[variant], f"trainer.data_plane={plane}") for plane in ("value", "reference")
    )
    assert len(by_value) == 3
    assert by_reference == by_value
    first, second = (load_file(tmp_path / plane / "model" / "model.safetensors") for plane in ("value", "reference"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


class Rollouts(Hook):
    """Reads what a run keeps of its responses."""

    def __init__(self):
        self.rows = []

    def on_rollouts(self, step, rows):
        self.rows += rows


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_the_controller_fetches_what_it_reads_and_nothing_else(tmp_path, monkeypatch, estimator):
    fetched = set()
    column = StoredBatch.column

    def watched(self, name):
        if name in self.stored_columns:
            fetched.add(name)
        return column(self, name)

    monkeypatch.setattr(StoredBatch, "column", watched)
    rollouts = Rollouts()
    overrides = [f"algorithm.adv_estimator={estimator}", f"{ACTOR}.use_kl_loss=true", "trainer.data_plane=reference"]
    run(tmp_path / "run", *overrides, hooks=[rollouts])
    reads = {"responses", "response_mask", "rollout_log_probs", "old_log_probs", "entropys", "policy_version"}
    assert fetched == reads | ({"values"} if estimator == "gae" else set())
    assert len(rollouts.rows) == 2 * 5 * 3


@pytest.mark.parametrize("plane", ["value", "reference"])
def test_the_plan_says_which_way_columns_go(plane):
    plan = plan_run(load_config(overrides=[*SMALL, f"trainer.data_plane={plane}"]))
    assert plan.sizes["columns"].endswith(f"(trainer.data_plane={plane})")
    assert [stage.name for stage in plan.stages][:2] == ["gen", "reward"]
