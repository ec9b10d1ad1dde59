"""The choice of algorithms is checked before anything is loaded."""

import pytest
import torch

from kapell.trainer.algorithms import advantage_estimators, compute_advantages, policy_losses
from kapell.trainer.choices import advantage_options, check_algorithms, policy_loss_options
from kapell.trainer.config_load import load_config


@pytest.mark.parametrize("name", sorted(advantage_estimators))
def test_every_estimator_runs(name):
    check_algorithms(load_config(overrides=[f"algorithm.adv_estimator={name}"]).config)


@pytest.mark.parametrize("name", sorted(policy_losses))
def test_every_loss_is_accepted_with_the_options_it_needs(name):
    overrides = [f"actor_rollout_ref.actor.policy_loss.loss_mode={name}"]
    if name == "dro":
        with pytest.raises(ValueError, match="dro_beta"):
            check_algorithms(load_config(overrides=overrides).config)
        overrides.append("actor_rollout_ref.actor.policy_loss.options.dro_beta=0.1")
    config = load_config(overrides=overrides).config
    check_algorithms(config)
    assert name != "dro" or policy_loss_options(config)["dro_beta"] == 0.1


def test_option_of_an_estimator_reaches_it():
    config = load_config(overrides=["algorithm.adv_options.unbiased_std=false"]).config
    check_algorithms(config)
    assert advantage_options(config, (1.0,))["unbiased_std"] is False


def test_unknown_option_suggests_the_nearest():
    config = load_config(overrides=["algorithm.adv_options.unbiased_sdt=false"]).config
    with pytest.raises(ValueError, match="did you mean 'unbiased_std'"):
        check_algorithms(config)


def test_estimator_of_ones_own_is_found_by_import_path(tmp_path, monkeypatch):
    (tmp_path / "own_estimators.py").write_text(
        "def halved(token_level_rewards, response_mask, *, factor=0.5):\n"
        "    advantages = factor * token_level_rewards.sum(-1, keepdim=True) * response_mask\n"
        "    return advantages, advantages\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(
        overrides=["algorithm.adv_estimator=own_estimators:halved", "algorithm.adv_options.factor=0.25"]
    ).config
    check_algorithms(config)
    options = advantage_options(config, (1.0,))
    columns = {"token_level_rewards": torch.tensor([[0.0, 4.0]]), "response_mask": torch.ones(1, 2)}
    advantages, *_ = compute_advantages("own_estimators:halved", columns, options)
    assert advantages.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_one_response_per_prompt_is_refused_where_responses_are_compared(name):
    overrides = [f"algorithm.adv_estimator={name}", "actor_rollout_ref.rollout.n=1"]
    with pytest.raises(ValueError, match=f"{name} compares the responses to a prompt, and .*rollout.n=1 is one"):
        check_algorithms(load_config(overrides=overrides).config)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "remax"])
def test_one_response_per_prompt_is_enough_for_the_others(name):
    check_algorithms(load_config(overrides=[f"algorithm.adv_estimator={name}", "actor_rollout_ref.rollout.n=1"]).config)


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.use_kl_in_reward=true",
        "reward.missing_eos_penalty=1",
        "reward.overlong_buffer={enable: true, len: 2}",
    ],
)
def test_penalties_are_refused_where_the_estimator_compares_the_rewards_before_them(override):
    check_algorithms(load_config(overrides=[override]).config)
    config = load_config(overrides=["algorithm.adv_estimator=gdpo", override]).config
    with pytest.raises(ValueError, match="gdpo makes advantages of the single rewards"):
        check_algorithms(config)


def test_a_target_divergence_is_refused_where_the_loss_does_not_know_the_old_policy():
    target = "actor_rollout_ref.actor.target_kl=0.1"
    check_algorithms(load_config(overrides=[target]).config)
    config = load_config(overrides=[target, "actor_rollout_ref.actor.policy_loss.loss_mode=gpg"]).config
    with pytest.raises(ValueError, match=r"target_kl=0.1: .*loss_mode=gpg does not read old_log_probs"):
        check_algorithms(config)
