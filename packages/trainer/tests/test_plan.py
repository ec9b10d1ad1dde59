"""What a configuration will do, said before it does."""

import re
import sys
from dataclasses import fields, is_dataclass
from functools import cache

import pytest

from kapell.trainer.build import build_stages, prepare
from kapell.trainer.cli import main
from kapell.trainer.config import Config
from kapell.trainer.config_load import load_config
from kapell.trainer.inactive import inactive_keys, inactive_settings
from kapell.trainer.lora import build_with_adapter
from kapell.trainer.plan import plan_run
from kapell.trainer.roles import worker_groups

KL = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "actor_rollout_ref.actor.use_kl_loss=true"]
REWARD_MODEL = ["reward.reward_model.enable=true", "reward.reward_model.path=somewhere"]
CORRECTION = [
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
    "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
]
OWN_POOL = [*REWARD_MODEL, "reward.reward_model.enable_resource_pool=true"]
OPENAI = ["actor_rollout_ref.rollout.name=openai"]


@cache
def plan(*overrides):
    return plan_run(load_config(overrides=overrides))


def stage(found, name):
    return next(stage for stage in found.stages if stage.name == name)


def test_grpo_has_one_role_and_no_stage_of_a_critic_or_reference():
    found = plan()
    assert found.step == "kapell.trainer.steps.group_step"
    assert [role.name for role in found.roles] == ["actor_rollout_ref"]
    assert "no KL penalty asks for a reference" in found.roles[0].reason
    names = [stage.name for stage in found.stages]
    assert names == ["gen", "reward", "old_log_prob", "rollout_corr", "shape_rewards", "adv", "update_actor"]
    assert found.inactive == []


def test_every_role_of_a_large_configuration_has_a_reason_and_a_place():
    found = plan(
        "algorithm.adv_estimator=gae", *KL, *OPENAI, *REWARD_MODEL, "reward.reward_model.enable_resource_pool=true"
    )
    assert found.step == "kapell.trainer.steps.ppo_step"
    roles = {role.name: role for role in found.roles}
    assert set(roles) == {"actor_rollout_ref", "critic", "rollout", "reward_model"}
    assert all(role.reason for role in found.roles)
    assert (
        "algorithm.use_kl_in_reward=true and actor_rollout_ref.actor.use_kl_loss=true"
        in roles["actor_rollout_ref"].reason
    )
    assert roles["reward_model"].pool == "reward_model"
    assert [(pool.name, pool.processes) for pool in found.pools] == [("workers", 2), ("reward_model", 1)]
    assert [call.role for call in stage(found, "reward").calls] == ["reward_model"]
    assert "rollout" in {call.role for call in stage(found, "gen").calls}


def test_what_an_adapter_changes_is_shown_and_the_step_in_small_has_one(monkeypatch):
    lora = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.target_modules=[q_proj]", *KL]
    lora += ["algorithm.adv_estimator=gae", "critic.model.lora_rank=4"]
    built = []

    def recording(build, adapter, *, seed):
        built.append(adapter.task_type)
        return build_with_adapter(build, adapter, seed=seed)

    monkeypatch.setattr("kapell.trainer.role_models.build_with_adapter", recording)
    found = plan(*lora)
    assert sorted(built) == ["CAUSAL_LM", "TOKEN_CLS"]
    policy, critic = (role.reason for role in found.roles)
    assert policy.startswith("the policy: an adapter of rank 8 on it is trained and samples; keeps itself without the")
    assert critic.endswith("needs values; an adapter of rank 4 and the head are trained")
    assert stage(found, "ref").calls[0].method == "compute_ref_log_prob"


def test_columns_follow_the_algorithm():
    assert "values" not in stage(plan(), "adv").reads
    assert "values" in stage(plan("algorithm.adv_estimator=gae"), "adv").reads
    penalized = plan(*KL)
    assert {"ref_log_prob", "old_log_probs"} <= set(stage(penalized, "shape_rewards").reads)
    assert "ref_log_prob" in stage(penalized, "update_actor").reads


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm.adv_estimator=gae", *KL],
        [*OPENAI, *REWARD_MODEL],
        ["algorithm.adv_estimator=remax"],
        ["actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.actor.use_dynamic_bsz=true"],
        ["algorithm.adv_estimator=optimal_token_baseline", *CORRECTION],
    ],
)
def test_stages_and_workers_make_no_column_that_they_do_not_declare(overrides):
    for seen in plan(*overrides).stages:
        assert set(seen.made) <= set(seen.writes), seen.name
        assert set(seen.reads) <= set(seen.before), seen.name
        for call in seen.calls:
            assert set(call.writes) <= {*seen.made, *seen.before, "reward_model_scores", "sum_pi_squared"}, call


def test_remax_has_the_stage_of_its_greedy_baseline():
    found = plan("algorithm.adv_estimator=remax")
    assert found.step.endswith("remax_step")
    assert stage(found, "gen_max").made == ("reward_baselines",)
    assert {call.method for call in stage(found, "gen_max").calls} == {"generate_sequences"}


_TERMS = ["reward.terms.right.type=function", "reward.terms.brief.type=remote"]
_MINE = ["reward.custom_reward_function.path=mine.py"]


@pytest.mark.parametrize(
    ("rewards", "weights"),
    [
        ([], [1]),
        (_TERMS, [1, 2]),
        (_MINE, [1]),
        (REWARD_MODEL, [1]),
        ([*_MINE, *REWARD_MODEL], [1, 2]),
        ([*_TERMS, *REWARD_MODEL], [1, 2, 3]),
    ],
)
def test_the_step_in_small_has_as_many_rewards_as_the_run(rewards, weights):
    gdpo = ["algorithm.adv_estimator=gdpo", f"algorithm.adv_options.component_weights={weights}"]
    assert stage(plan(*gdpo, *rewards), "adv").made
    other = [gdpo[0], f"algorithm.adv_options.component_weights={[*weights, 1]}"]
    with pytest.raises(ValueError, match=f"{len(weights) + 1} component_weights for {len(weights)} reward components"):
        plan(*other, *rewards)


def test_an_update_sends_only_what_the_loss_reads():
    (update,) = stage(plan(), "update_actor").calls
    assert set(update.reads) == {
        *("input_ids", "attention_mask", "position_ids", "responses", "response_mask"),
        *("old_log_probs", "advantages"),
    }


def test_a_key_that_was_set_and_does_nothing_is_listed_with_what_it_needs():
    found = inactive_settings(
        load_config(overrides=["actor_rollout_ref.actor.kl_loss_coef=0.5", "critic.grad_clip=1.0"])
    )
    assert [(key.key, key.value, key.reason) for key in found] == [
        ("actor_rollout_ref.actor.kl_loss_coef", 0.5, "needs actor_rollout_ref.actor.use_kl_loss=true"),
        ("critic.grad_clip", 1.0, "needs algorithm.adv_estimator=gae"),
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (3, False, "seq-mean-token-mean")),
        (["critic.ppo_epochs=1", "critic.shuffle=true", "critic.loss_agg_mode=token-mean"], (1, True, "token-mean")),
    ],
)
def test_the_critic_is_updated_as_the_actor_where_it_says_nothing(tmp_path, overrides, expected):
    actor = ("ppo_epochs=3", "shuffle=false", "loss_agg_mode=seq-mean-token-mean")
    keys = [*SMALL, "algorithm.adv_estimator=gae", *(f"actor_rollout_ref.actor.{key}" for key in actor), *overrides]
    prepared = prepare(load_config(overrides=keys).config, tmp_path)
    with worker_groups(prepared) as groups:
        stages = build_stages(prepared, groups, tmp_path)
    plan = stages.value_plan
    assert (plan.epochs, plan.shuffle, stages.value_objective.loss_agg_mode) == expected
    assert (stages.policy_plan.epochs, stages.policy_plan.shuffle) == (3, False)


def test_a_warm_up_of_a_critic_that_there_is_none_of_does_nothing_and_says_so():
    found = load_config(overrides=["trainer.critic_warmup=20"])
    assert [key.key for key in inactive_settings(found)] == ["trainer.critic_warmup"]
    assert found.config.actor_warmup == 0
    found = load_config(overrides=["trainer.critic_warmup=20", "algorithm.adv_estimator=gae"])
    assert inactive_settings(found) == []
    assert found.config.actor_warmup == 20


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([], "needs algorithm.rollout_correction.bypass_mode=false"),
        (["actor_rollout_ref.actor.use_kl_loss=true"], None),
        (["algorithm.use_kl_in_reward=true"], None),
    ],
)
def test_sizes_of_the_recomputed_pass_do_nothing_without_it_unless_the_reference_takes_them(overrides, reason):
    sizes = ("log_prob_micro_batch_size_per_gpu=4", "log_prob_use_dynamic_bsz=false")
    bypass = ["algorithm.rollout_correction.bypass_mode=true", *(f"actor_rollout_ref.rollout.{size}" for size in sizes)]
    reasons = [key.reason for key in inactive_settings(load_config(overrides=[*bypass, *overrides]))]
    assert len(reasons) == (2 if reason else 0)
    assert all(found.startswith(reason) for found in reasons)


def test_a_file_with_all_keys_lists_only_what_differs_from_the_default(tmp_path):
    first = load_config(overrides=["critic.grad_clip=3.0"])
    (tmp_path / "config.yaml").write_text(first.to_yaml())
    again = load_config([tmp_path / "config.yaml"])
    assert [key.key for key in inactive_settings(again)] == ["critic.grad_clip"]


def test_conditions_name_keys_that_exist():
    for config in (load_config().config, load_config(overrides=["algorithm.adv_estimator=gae"]).config):
        inactive_keys(config)  # an unknown key in a condition is an AttributeError
    for group in _groups(Config()):
        unknown = set(getattr(group, "active_if", {})) - {field.name for field in fields(group)}
        assert not unknown, type(group)


SMALL = [
    "backend=local",
    "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=1",
    "trainer.test_freq=1",
    "trainer.default_local_dir=run",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.model.hidden_size=16",
]
SCENARIOS = {
    "grpo": [],
    "ppo": ["algorithm.adv_estimator=gae", *KL],
    "sampled": ["actor_rollout_ref.rollout.val_kwargs.do_sample=true", "trainer.logger=[tensorboard]"],
    "function": ["reward.custom_reward_function.path=mine.py", "reward.on_error=fallback"],
    "correction": CORRECTION,
    "checkpoints": ["trainer.save_freq=1", "trainer.keep_best=val/exact_match", "trainer.max_ckpt_to_keep=1"],
    "by tokens": ["algorithm.adv_estimator=gae", *KL, "actor_rollout_ref.actor.use_dynamic_bsz=true"],
    "other optimizers": [
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=polynomial",
        "critic.optim.lr_scheduler_type=polynomial",
    ],
    "adapters": [
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.model.lora_rank=1",
        "critic.model.lora_rank=1",
    ],
    "length penalties": [
        "reward.overlong_buffer.enable=true",
        "reward.overlong_buffer.len=2",
        "reward.missing_eos_penalty=0.5",
        "actor_rollout_ref.actor.target_kl=0.1",
    ],
    "schedules": [
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "critic.optim.lr_scheduler_type=linear",
    ],
}
BUILT_ONLY = {
    "server": OPENAI,
    "resumed": ["trainer.resume_mode=path", "trainer.resume_from_path=somewhere"],
    "reward model": [
        *REWARD_MODEL,
        "reward.reward_model.path=reward_model",
        "reward.reward_model.enable_resource_pool=true",
    ],
}


@pytest.fixture
def reads(monkeypatch):
    """The dotted keys that are read from groups which `_watch` has marked, also from copies of these."""
    found = set()

    def spy_on(cls):
        original = cls.__getattribute__

        def get(self, attribute):
            inner = object.__getattribute__(self, "__dict__")
            if _MARK not in inner:
                return original(self, attribute)
            if attribute == "__dict__":  # `vars(group)` reads all
                found.update(inner[_MARK] + field.name for field in fields(cls))
                return {name: value for name, value in inner.items() if name != _MARK}
            found.add(inner[_MARK] + attribute)
            return original(self, attribute)

        monkeypatch.setattr(cls, "__getattribute__", get, raising=False)

    for cls in {type(group) for group in _groups(Config())}:
        spy_on(cls)
    return found


_MARK = "_prefix"


def _watch(config, prefix=""):
    for field in fields(config):
        if is_dataclass(value := getattr(config, field.name)):
            _watch(value, f"{prefix}{field.name}.")
    object.__setattr__(config, _MARK, prefix)


def _groups(config):
    yield config
    for field in fields(config):
        if is_dataclass(value := getattr(config, field.name)):
            yield from _groups(value)


def _run(overrides, reads, monkeypatch):
    """Train by the command line; the configuration that it used, and which of its keys it read."""
    loaded = []

    def load(*arguments, **options):
        loaded.append(load_config(*arguments, **options))
        _watch(loaded[-1].config)
        return loaded[-1]

    monkeypatch.setattr("kapell.trainer.cli.common.load_config", load)
    main(["train", *SMALL, *overrides])
    return loaded[-1].config


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_key_is_read_by_a_run_or_has_a_condition_that_says_why_not(name, reads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0.0\n"
    )
    config = _run(SCENARIOS[name], reads, monkeypatch)
    read = set(reads)
    inactive = inactive_keys(config)
    keys = {key for key, _, _ in load_config().leaves()}
    assert sorted(keys - read - set(inactive)) == [], "does nothing here; give it a condition in its group's active_if"


def test_every_condition_is_met_in_some_run():
    """So that no key hides behind a condition that never holds."""
    everywhere = {**SCENARIOS, **BUILT_ONLY}
    never = {key for key, _, _ in load_config().leaves()}
    for overrides in everywhere.values():
        never &= set(inactive_keys(load_config(overrides=[*SMALL, *overrides]).config))
    assert not never


def test_keys_of_roles_that_need_others_are_read_when_these_are_built(reads, tmp_path, monkeypatch, tokenizer):
    from transformers import GPT2Config, GPT2ForSequenceClassification

    sizes = GPT2Config(vocab_size=len(tokenizer), n_embd=8, n_layer=1, n_head=1, n_positions=64, pad_token_id=0)
    sizes.num_labels = 1
    monkeypatch.chdir(tmp_path)
    GPT2ForSequenceClassification(sizes).save_pretrained("reward_model")
    config = load_config(overrides=[*SMALL, *BUILT_ONLY["server"], *BUILT_ONLY["reward model"]]).config
    _watch(config)
    prepared = prepare(config, tmp_path)
    with worker_groups(prepared) as groups:
        build_stages(prepared, groups, tmp_path)
    read = set(reads)
    prefixes = ("actor_rollout_ref.rollout.server.", "reward.reward_model.")
    wanted = {key for key, _, _ in load_config().leaves() if key.startswith(prefixes)}
    assert not wanted - read


def test_the_command_shows_mode_roles_stages_and_keys_without_effect(capsys):
    main(["plan", "backend=local", "algorithm.adv_estimator=rloo", "actor_rollout_ref.actor.kl_loss_type=k2"])
    shown = re.sub(r"[\s│]+", "", capsys.readouterr().out)
    for part in (
        "kapell.trainer.steps.group_step:algorithm.adv_estimator=rlooneedsnovalues,sothereisnocritic",
        "64promptsx8samples=512",
        "token_level_rewards",
        "actor_rollout_ref.actor.use_kl_loss=true",
    ):
        assert part in shown


def test_a_plan_of_what_cannot_run_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["plan", "algorithm.adv_estimator=grp"])
    assert caught.value.code == 2
    assert "did you mean" in capsys.readouterr().err


REWARD = "reward.custom_reward_function"
ROWS = '{"data_source": "mine", "prompt": "1", "reward_model": {"ground_truth": "1"}}'
OBSTACLES = {
    "no data file nowhere.jsonl": ["data.train_files=nowhere.jsonl"],
    "no data file held_out.jsonl": ["data.train_files=rows.jsonl", "data.val_files=held_out.jsonl"],
    "no reward belongs to data_source 'mine'": ["data.train_files=rows.jsonl"],
    "no reward file nowhere.py": [f"{REWARD}.path=nowhere.py"],
    "has no function 'score'; did you mean 'scored'?": [f"{REWARD}.path=mine.py", f"{REWARD}.name=score"],
    "no model folder somewhere": REWARD_MODEL,
    "no tokenizer folder missing": ["data.tokenizer=missing"],
    "no model folder policy": ["actor_rollout_ref.model.path=policy"],
    "the model has 10 positions": ["actor_rollout_ref.model.override_config.max_position_embeddings=10"],
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(f"{ROWS}\n")
    (tmp_path / "mine.py").write_text(
        "def scored(data_source, solution_str, ground_truth, extra_info):\n    return 0.0\n"
    )
    return tmp_path


@pytest.mark.parametrize("words", OBSTACLES)
def test_what_would_end_the_run_before_it_starts_is_said_in_the_run_s_own_words(files, words):
    resolved = load_config(overrides=OBSTACLES[words])
    with pytest.raises((ValueError, OSError), match=re.escape(words)) as caught:
        prepare(resolved.config, files)
    found = plan_run(resolved)
    assert found.obstacle == str(caught.value)
    assert found.stages


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.resume_mode=path", "trainer.resume_from_path=gone"], "gone"),
        (["trainer.resume_mode=path", "trainer.resume_from_path=old"], "old"),
        (["trainer.default_local_dir=old"], "old holds a run already"),
        (["trainer.logger=[wandb]"], r"pip install kapell-trainer\[wandb\]"),
    ],
)
def test_a_checkpoint_a_folder_or_a_logger_that_would_end_the_run_is_in_the_plan(files, monkeypatch, overrides, words):
    monkeypatch.setitem(sys.modules, "wandb", None)
    (files / "old").mkdir()
    (files / "old" / "metrics.jsonl").write_text("{}\n")
    found = plan_run(load_config(overrides=overrides))
    assert found.obstacle is not None
    assert re.search(words, found.obstacle)


@pytest.mark.parametrize("options", [[], ["backend.options.address=here"]])
def test_a_backend_that_is_not_installed_is_in_the_plan(files, options):
    found = plan_run(load_config(overrides=["backend.name=locl", *options]))
    assert found.obstacle is not None
    assert "no backend 'locl' is installed" in found.obstacle
    assert "did you mean 'local'?" in found.obstacle
    assert found.stages


def test_a_plan_makes_no_folder(files):
    assert plan_run(load_config(overrides=["backend=local", "trainer.default_local_dir=new"])).obstacle is None
    assert not (files / "new").exists()


def test_a_plan_without_an_obstacle_has_none(files):
    assert plan("backend=local").obstacle is None
    assert plan_run(load_config(overrides=["data.train_files=rows.jsonl", f"{REWARD}.path=mine.py"])).obstacle
    sound = ["backend=local", "data.train_files=rows.jsonl", f"{REWARD}.path=mine.py", f"{REWARD}.name=scored"]
    assert plan_run(load_config(overrides=sound)).obstacle is None


def test_the_command_shows_the_plan_and_ends_with_what_is_in_its_way(files, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["plan", "data.train_files=nowhere.jsonl"])
    assert caught.value.code == 1
    shown = capsys.readouterr().out
    assert "group_step" in shown
    assert shown.rstrip().endswith("cannot start: no data file nowhere.jsonl")


def test_a_budget_of_tokens_that_fits_short_rows_only_can_be_planned():
    budgets = [f"{key}_max_token_len_per_gpu=4" for key in ("actor_rollout_ref.actor.ppo", "critic.forward")]
    assert plan("actor_rollout_ref.actor.use_dynamic_bsz=true", "algorithm.adv_estimator=gae", *budgets).stages
