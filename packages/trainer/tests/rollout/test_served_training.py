"""A whole run that samples from a server: its weights follow the policy."""

import json

import pytest

from kapell.trainer.build import prepare, train
from kapell.trainer.config_load import load_config
from kapell.trainer.run_folder import RunFiles


@pytest.mark.parametrize("reload", [True, False])
def test_a_run_samples_from_the_server_and_keeps_it_up_to_date(tmp_path, serving, reload):
    overrides = [
        "backend=local",
        "trainer.total_training_steps=2",
        "trainer.test_freq=-1",
        "data.train_batch_size=4",
        "data.max_response_length=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_epochs=1",
        "actor_rollout_ref.model.hidden_size=16",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.name=openai",
    ]
    if not reload:
        overrides.append("actor_rollout_ref.rollout.server.reload_path=null")
    first = prepare(load_config(overrides=overrides).config, tmp_path / "first").build_policy()
    with serving(first) as (server, url):
        config = load_config(overrides=[*overrides, f"actor_rollout_ref.rollout.server.url={url}"]).config
        folder = tmp_path / "run"
        train(prepare(config, folder), folder, hooks=[RunFiles(folder)])
    assert len(server.requests) == 2 * 4 * 2
    assert server.loaded == ([str(folder / "rollout_weights")] * 2 if reload else [])
    one, two = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    assert one["training/rollout_log_probs_diff_max"] < 1e-4
    if reload:
        assert two["training/rollout_log_probs_diff_max"] < 1e-4
    else:
        assert two["training/rollout_log_probs_diff_max"] > 1e-4
