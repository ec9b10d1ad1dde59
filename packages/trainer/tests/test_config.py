import re
from dataclasses import is_dataclass, replace
from itertools import cycle
from types import GenericAlias
from typing import ClassVar, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kapell.trainer import verl_keys
from kapell.trainer.config import AlgorithmConfig, Config, OptimConfig, SamplingConfig
from kapell.trainer.config_load import ConfigError, load_config
from kapell.trainer.run_checkpoint import config_to_yaml


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


@given(st.text(st.characters(exclude_categories=["Cs"])) | st.from_regex(r"[-+.0-9][-+.0-9eE_:]{0,6}", fullmatch=True))
@example("1e-4")
@example("12e4")
@example("yes")
@example("0.5_2")
@example("")
def test_a_text_of_a_saved_configuration_stays_a_text(tmp_path_factory, text):
    assume("${" not in text)  # a reference to another key
    assume(text != "???")  # a value that is still to come
    config = load_config().config
    config = replace(config, trainer=replace(config.trainer, experiment_name=text))
    config = replace(config, data=replace(config.data, train_files=[text], apply_chat_template_kwargs={"x": text}))
    file = tmp_path_factory.mktemp("saved") / "config.yaml"
    file.write_text(config_to_yaml(config), encoding="utf-8")
    assert load_config([file]).config == config
    assert yaml.safe_load(file.read_text(encoding="utf-8"))["trainer"]["experiment_name"] == text


def test_values_that_verl_has_for_all_and_for_none_are_taken():
    overrides = ["actor_rollout_ref.rollout.val_kwargs.temperature=0", "trainer.max_ckpt_to_keep=-1"]
    config = load_config(overrides=[*overrides, "critic.optim.lr_warmup_steps=-1"]).config
    assert config.actor_rollout_ref.rollout.val_kwargs.temperature == 0.0
    assert (config.trainer.max_ckpt_to_keep, config.critic.optim.lr_warmup_steps) == (-1, -1)
    with pytest.raises(ConfigError, match=r"val_kwargs\.temperature must be above 0, got 0"):
        load_config(overrides=[overrides[0], "actor_rollout_ref.rollout.val_kwargs.do_sample=true"])
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.rollout\.temperature must be above 0, got 0"):
        load_config(
            overrides=[f"actor_rollout_ref.rollout.{key}" for key in ("temperature=0", "do_sample=false", "n=1")]
        )
    with pytest.raises(ConfigError, match=r"critic\.shuffle: expected true or false, got 3"):
        load_config(overrides=["critic.shuffle=3"])
    with pytest.raises(ConfigError, match="lr_warmup_steps must be -1 or more, got -2"):
        load_config(overrides=["critic.optim.lr_warmup_steps=-2"])


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
        ("trainer.save_freq=0", "trainer.save_freq must be -1 (never) or a number of steps, got 0"),
        ("trainer.seed=-1", "trainer.seed must not be negative, got -1"),
        ("data.seed=-1", "data.seed must not be negative, got -1"),
        ("algorithm.kl_ctrl.kl_coef=-1", "algorithm.kl_ctrl.kl_coef must not be negative, got -1.0"),
        ("actor_rollout_ref.rollout.server.retries=-1", "server.retries must not be negative, got -1"),
        ("trainer.val_before_train=3", "trainer.val_before_train: expected true or false, got 3"),
        ("trainer.val_before_train='3'", "trainer.val_before_train: expected true or false, got '3'"),
        ("trainer.seed=???", "trainer.seed: ??? stands for a value that is missing"),
        ("actor_rollout_ref.actor.optim.betas=[0.9]", "actor_rollout_ref.actor.optim.betas: expected 2 values"),
        ("data.train_files=[a.jsonl, 007]", "data.train_files: expected a text, and YAML reads the int 7"),
        ("trainer.seed=" + 5000 * "9", "is not valid YAML: Exceeds the limit"),
    ],
)
def test_a_wrong_override_says_what_is_wrong_and_what_was_meant(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(overrides=[override])


_SHAPES = {int: "{}", float: "{}", tuple: "[0.9,{}]", dict: "{{a: {{b: [1, {}]}}}}"}


_NOT_FINITE = [".nan", "-.inf", ".inf", "1e400", 400 * "9"]


def test_a_number_that_is_not_finite_is_refused_wherever_one_is_taken():
    """Comparisons with NaN are false, and infinity passes most of them: they would end as a loss of NaN."""
    takes = {key: kind for key, kind in _kinds(Config) if kind in _SHAPES}
    assert {*_SHAPES} == {*takes.values()}
    for (key, kind), value in zip(takes.items(), cycle(_NOT_FINITE)):
        with pytest.raises(ConfigError) as caught:
            load_config(overrides=[f"{key}={_SHAPES[kind].format(value)}"])
        expected = r"expected a (finite number, got -?(inf|nan)|number of at most 64 bits, got 9+) \(command line\)"
        assert re.fullmatch(rf"{re.escape(key)}[.ab]*: {expected}", str(caught.value))


def _kinds(cls, prefix=""):
    """Each dotted key with its type, or the first that it may have."""
    for name, kind in get_type_hints(cls).items():
        if is_dataclass(kind):
            yield from _kinds(kind, f"{prefix}{name}.")
        elif get_origin(kind) is not ClassVar:
            yield f"{prefix}{name}", get_origin(kind) if isinstance(kind, GenericAlias) else (*get_args(kind), kind)[0]


def test_a_text_that_is_read_as_a_number_is_refused_where_that_is_not_finite():
    with pytest.raises(ConfigError, match=r"optim\.lr: expected a finite number, got inf \(command line\)"):
        load_config(overrides=["actor_rollout_ref.actor.optim.lr='inf'"])


def test_an_infinite_number_behind_a_reference_is_refused_with_the_key_that_has_it(tmp_path):
    (tmp_path / "mine.yaml").write_text("reward:\n  fallback_score: ${trainer.project_name}\n")
    with pytest.raises(
        ConfigError, match=r"reward\.fallback_score: expected a finite number, got inf \(.*mine\.yaml\)"
    ):
        load_config([tmp_path / "mine.yaml"], ["trainer.project_name=inf"])


@pytest.mark.parametrize("text", ["007", "yes", "1e3", "12:30:45", "0x10", "1.50"])
def test_a_name_that_yaml_would_read_as_something_else_stays_as_it_was_written(text):
    overrides = [f"trainer.experiment_name={text}", f"data.train_files={text}"]
    config = load_config(overrides=overrides).config
    assert (config.trainer.experiment_name, config.data.train_files) == (text, [text])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"trainer: {experiment_name: 007}", "trainer.experiment_name: expected a text, and YAML reads the int 7"),
        (b"trainer: {experiment_name: \xe9}", "is not valid YAML: 'utf-8' codec can't decode"),
    ],
)
def test_a_file_in_which_a_value_is_not_what_it_seems_is_refused(tmp_path, content, message):
    (tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_config([tmp_path / "mine.yaml"])
    assert "mine.yaml" in str(caught.value)


def test_two_bounds_in_a_file_are_no_number(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "algorithm:\n  rollout_correction:\n    rollout_is: token\n    rollout_is_threshold: 0.5_2  # IcePop\n"
    )
    assert load_config([tmp_path / "mine.yaml"]).config.algorithm.rollout_correction.rollout_is_threshold == "0.5_2"


@pytest.mark.parametrize(
    "override", [".rollout_is_threshold=0.5_2", "={rollout_is_threshold: 0.5_2, rollout_is: token}"]
)
def test_two_bounds_on_the_command_line_are_no_number(override):
    config = load_config(overrides=[f"algorithm.rollout_correction{override}"]).config
    assert config.algorithm.rollout_correction.rollout_is_threshold == "0.5_2"


@pytest.mark.parametrize(("value", "expected"), [("0", False), ("1", True), ("false", False), ("TRUE", True)])
def test_truth_is_written_as_a_word_or_as_0_and_1(value, expected):
    assert load_config(overrides=[f"trainer.val_before_train={value}"]).config.trainer.val_before_train is expected


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


def test_all_unknown_keys_are_told_at_once(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("trainer: {sede: 1, test_freq: 5}\nalgoritm: {gamma: 1}\n")
    with pytest.raises(ConfigError) as caught:
        load_config([file], ["trainer.seed=3", "data.train_batch_sise=4"])
    first, second, third = str(caught.value).splitlines()
    assert first == f"unknown key trainer.sede ({file}); did you mean trainer.seed?"
    assert second.startswith(f"unknown key algoritm.gamma ({file}); did you mean algorithm.gamma")
    assert third == "unknown key data.train_batch_sise (command line); did you mean data.train_batch_size?"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("actor_rollout_ref.model.use_remove_padding=True", "leave it out"),
        ("critic.model.fsdp_config.param_offload=False", "critic.strategy"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=0.6", "option of the server"),
        ("actor_rollout_ref.rollout.name=vllm", "rollout.name=openai and rollout.server.url"),
        ("actor_rollout_ref.actor.strategy=fsdp", "set fsdp2"),
        ("critic.ppo_micro_batch_size=4", "critic.ppo_micro_batch_size_per_gpu; set that"),
        ("reward_model.overlong_buffer.len=4096", "set reward.overlong_buffer.enable"),
        ("reward_model.enable=False", "did you mean reward.reward_model.enable?"),
        ("custom_reward_function.path=x.py", "did you mean reward.custom_reward_function.path?"),
        ("algorithm.norm_adv_by_std_in_grpo=False", "algorithm.norm_scope=none"),
        ("ray_kwargs.ray_init.num_cpus=8", "backend.options={num_cpus: 8}"),
        ("trainer.val_only=True", "trainer.total_training_steps=0"),
        ("critic.warmup=1", "did you mean trainer.critic_warmup?"),
    ],
)
def test_keys_of_verl_without_a_counterpart_say_what_to_do(override, told):
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[override])
    assert told in str(caught.value)


def test_what_is_said_of_verls_keys_is_true_of_ours():
    known = {key for key, _, _ in load_config().leaves()}
    ends = {".".join(key.split(".")[start:]) for key in known for start in range(len(key.split(".")))}
    groups = {end.rpartition(".")[0] for end in ends} | {key.split(".")[0] for key in known}
    assert not ends & set(verl_keys._KEYS), "a key that exists needs no substitute"
    told = [*verl_keys._KEYS.values(), *(text for texts in verl_keys._VALUES.values() for text in texts.values())]
    pattern = re.compile(r"\b(?:data|reward|trainer|algorithm|critic|actor|rollout|optim|backend)\.[a-z_.]*[a-z_]")
    named = {name for text in told for name in pattern.findall(text.replace("docs/trainer.md", ""))}
    assert len(named) > 20
    assert not named - ends - groups
