import re

import pytest

from kapell.trainer.config import AlgorithmConfig, Config, OptimConfig, SamplingConfig
from kapell.trainer.config_load import ConfigError, load_config


def test_the_defaults_are_a_valid_configuration():
    assert load_config().config == Config()


def test_later_sources_win_and_their_origin_is_known(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("trainer:\n  seed: 3\n  test_freq: 5\nbackend: local\n")
    resolved = load_config([file], ["trainer.seed=4"])
    assert (resolved.config.trainer.seed, resolved.config.trainer.test_freq) == (4, 5)
    assert resolved.config.backend.name == "local"
    origins = {key: origin for key, _, origin in resolved.leaves()}
    assert origins["trainer.seed"] == "command line"
    assert origins["trainer.test_freq"] == origins["backend.name"] == str(file)
    assert origins["trainer.save_freq"] == "default"


def test_what_is_saved_reads_back_as_the_same_configuration(tmp_path):
    resolved = load_config(
        overrides=["data.train_files=rows.jsonl", "actor_rollout_ref.model.override_config.n_inner=3", "backend=local"]
    )
    file = tmp_path / "config.yaml"
    file.write_text(resolved.to_yaml())
    assert load_config([file]).config == resolved.config


def test_a_reference_to_another_key_is_resolved():
    assert load_config(overrides=["data.seed=${trainer.seed}", "trainer.seed=9"]).config.data.seed == 9


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.adv_estimater=gae", "did you mean algorithm.adv_estimator?"),
        ("actor.optim.lr=1", "did you mean actor_rollout_ref.actor.optim.lr?"),
        ("lr=1", "did you mean actor_rollout_ref.actor.optim.lr or critic.optim.lr?"),
        ("+trainer.seed=1", "did you mean trainer.seed?"),
        ("zzz=1", "known here: data, algorithm"),
        ("trainer.seed=abc", "trainer.seed: Value 'abc' of type 'str' could not be converted to Integer"),
        ("trainer.seed=abc", "expected int"),
        ("trainer.seed=1.5", "expected int"),
        ("trainer.logger=[wand]", "expected one of ['console', 'file', 'tensorboard'"),
        ("trainer=3", "trainer is a group with the keys"),
        ("trainer.seed", "not of the form group.key=value"),
        ("data.tokenizer=[1", "is not valid YAML"),
        ("actor_rollout_ref.actor.optim.lr=-1", "actor_rollout_ref.actor.optim.lr must be above 0, got -1.0"),
        ("actor_rollout_ref.rollout.top_k=0", "actor_rollout_ref.rollout.top_k must be -1 (all tokens) or at least 1"),
        ("actor_rollout_ref.model.hidden_size=10", "multiple of num_attention_heads, got 10 and 4"),
        ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=32 prompts is more than"),
        ("data.val_files=x.jsonl", "val_files needs train_files"),
        ("trainer.test_freq=-2", "trainer.test_freq must be -1 (never) or a number of steps"),
        ("trainer.seed=-1", "trainer.seed must not be negative, got -1"),
        ("data.seed=-1", "data.seed must not be negative, got -1"),
        ("algorithm.kl_ctrl.kl_coef=-1", "algorithm.kl_ctrl.kl_coef must not be negative, got -1.0"),
        ("actor_rollout_ref.rollout.server.retries=-1", "server.retries must not be negative, got -1"),
        ("reward.fallback_score=nan", "reward.fallback_score is not a number"),
        ("actor_rollout_ref.rollout.temperature=nan", "actor_rollout_ref.rollout.temperature is not a number"),
    ],
)
def test_a_wrong_override_says_what_is_wrong_and_what_was_meant(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(overrides=[override])


def test_a_missing_configuration_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"no configuration file nowhere\.yaml"):
        load_config(["nowhere.yaml"])


def test_a_file_that_is_no_mapping_is_refused(tmp_path):
    file = tmp_path / "list.yaml"
    file.write_text("- 1\n")
    with pytest.raises(ConfigError, match="must hold groups such as"):
        load_config([file])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: OptimConfig(lr=0.0), "lr must be above 0"),
        (lambda: OptimConfig(lr=float("nan")), "lr must be above 0, got nan"),
        (lambda: AlgorithmConfig(gamma=1.1), "gamma must lie between 0 and 1"),
        (lambda: SamplingConfig(n=2), "do_sample=true"),
    ],
)
def test_a_group_built_in_code_is_checked_as_well(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_zero_is_a_value_and_not_an_absence():
    config = load_config(overrides=["trainer.seed=0", "data.seed=0", "trainer.total_training_steps=0"]).config
    assert (config.trainer.seed, config.data.seed, config.trainer.total_training_steps) == (0, 0, 0)
