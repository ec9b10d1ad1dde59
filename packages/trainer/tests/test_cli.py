import json
import re

import pytest
import yaml

from kapell.trainer.cli import main
from kapell.trainer.data import pad_left
from kapell.trainer.tokenizer import build_character_tokenizer

SMALL = [
    "backend=local",
    "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=2",
    "trainer.test_freq=2",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.model.hidden_size=16",
]
ROW = {"data_source": "sums", "prompt": "1+2", "reward_model": {"ground_truth": "3"}, "extra_info": {"hint": "x"}}
REWARD = """
def right(data_source, solution_str, ground_truth, extra_info):
    assert data_source == "sums" and extra_info["hint"] == "x"
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)}

def broken(data_source, solution_str, ground_truth, extra_info):
    raise KeyError("oops")
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(ROW) + "\n" for _ in range(4)))
    (tmp_path / "bad.jsonl").write_text(json.dumps({**ROW, "reward_model": {}}) + "\n")
    (tmp_path / "mine.py").write_text(REWARD)
    return tmp_path


def train(*overrides):
    main(["train", *SMALL, *overrides])


def one_line(text):
    return re.sub(r"\s+", " ", text)


def test_a_run_leaves_everything_in_its_folder_and_its_model_answers(here, capsys):
    train("trainer.default_local_dir=run")
    folder = here / "run"
    names = {"config.yaml", "curves.png", "data", "metrics.jsonl", "model", "samples.jsonl"}
    assert names <= {path.name for path in folder.iterdir()}
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2]
    assert "val/exact_match" in records[0]
    expected = {"actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/grad_norm", "actor/lr", "actor/entropy"}
    expected |= {"critic/score/mean", "critic/rewards/mean", "critic/advantages/max", "response_length/mean"}
    expected |= {"timing_s/gen", "timing_s/update_actor", "timing_s/step", "perf/throughput", "training/global_step"}
    assert expected <= records[1].keys()
    assert records[1]["training/rollout_log_probs_diff_max"] < 1e-5
    assert yaml.safe_load((folder / "config.yaml").read_text())["backend"]["name"] == "local"
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 400
    shown = one_line(capsys.readouterr().out)
    assert "Run done: 2 of 2 steps" in shown
    assert "exact match on held-out prompts" in shown
    main(["generate", "run", "1234", "5678"])
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_responses_are_kept_in_the_runs_own_folder_or_where_no_other_run_has_any(here, capsys):
    kept = ["trainer.rollout_data_dir=rollouts", f"trainer.validation_data_dir={here / 'validation'}"]
    train("trainer.default_local_dir=first", *kept)
    assert {path.name for path in (here / "first" / "rollouts").iterdir()} == {"1.jsonl", "2.jsonl"}
    with pytest.raises(SystemExit):
        train("trainer.default_local_dir=second", *kept)
    assert "validation holds the responses of another run already" in one_line(capsys.readouterr().err)
    with pytest.raises(SystemExit):
        main(["plan", *SMALL, "trainer.default_local_dir=second", *kept])
    assert "validation holds the responses of another run already" in one_line(capsys.readouterr().out)
    train("trainer.default_local_dir=third", kept[0])
    assert {path.name for path in (here / "third" / "rollouts").iterdir()} == {"1.jsonl", "2.jsonl"}


def test_ppo_has_a_critic_and_both_kl_penalties_have_a_reference(here):
    train(
        "trainer.default_local_dir=run",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "trainer.critic_warmup=1",
    )
    first, second = [json.loads(line) for line in (here / "run/metrics.jsonl").read_text().splitlines()][1:]
    assert {"critic/vf_loss", "critic/vf_clipfrac", "critic/grad_norm", "critic/values/mean"} <= first.keys()
    assert "actor/pg_loss" not in first
    assert {"actor/pg_loss", "actor/kl_loss", "actor/reward_kl_penalty"} <= second.keys()
    assert second["actor/reward_kl_penalty_coeff"] != first["actor/reward_kl_penalty_coeff"]


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_rows_and_reward_of_ones_own_train_any_architecture(here, model_type):
    train(
        "trainer.default_local_dir=run",
        "data.train_files=rows.jsonl",
        "data.val_files=rows.jsonl",
        "reward.custom_reward_function.path=mine.py",
        "reward.custom_reward_function.name=right",
        f"actor_rollout_ref.model.model_type={model_type}",
    )
    records = [json.loads(line) for line in (here / "run/metrics.jsonl").read_text().splitlines()]
    assert records[-1]["reward/length"] > 0
    assert records[-1]["val/sums/exact_match"] == records[-1]["val/exact_match"]


def test_a_saved_model_is_trained_on(here):
    train("trainer.default_local_dir=first")
    train("trainer.default_local_dir=second", "actor_rollout_ref.model.path=first/model")
    first, second = [
        [json.loads(line) for line in (here / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("first", "second")
    ]
    assert second[0]["val/score/mean"] == first[-1]["val/score/mean"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.adv_estimater=gae"], "unknown key algorithm.adv_estimater"),
        (["data.train_files=nowhere.jsonl"], "no data file nowhere.jsonl"),
        (["data.train_files=bad.jsonl"], "bad.jsonl row 1 has no reward_model.ground_truth"),
        (["data.train_files=rows.jsonl"], "no reward belongs to data_source 'sums'"),
        (["actor_rollout_ref.model.path=nowhere"], "no model folder nowhere"),
        (["actor_rollout_ref.model.path=."], "is not a Hugging Face model folder: it has no config.json"),
        (["reward.custom_reward_function.path=nowhere.py"], "no reward file nowhere.py"),
        (
            ["reward.custom_reward_function.path=mine.py", "reward.custom_reward_function.name=rigth"],
            "has no function 'rigth'; did you mean 'right'?",
        ),
        (["algorithm.adv_estimator=grp"], "algorithm.adv_estimator: unknown advantage estimator 'grp'; did you mean"),
        (["actor_rollout_ref.actor.loss_agg_mode=mean"], "actor_rollout_ref.actor.loss_agg_mode: unknown loss"),
        (["actor_rollout_ref.actor.kl_loss_type=k9"], "actor_rollout_ref.actor.kl_loss_type: unknown KL"),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=ppo"], "loss_mode: unknown policy loss 'ppo'"),
        (["actor_rollout_ref.model.model_type=gtp2"], "knows no model_type 'gtp2'"),
        (["backend=rayy"], "no backend 'rayy' is installed"),
        (["backend.options.x=1"], "backend.options: got an unexpected keyword argument 'x'; backend local takes"),
        (["trainer.default_local_dir=mine.py"], "the run's folder cannot be mine.py: mine.py is a file"),
        (
            ["actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10"],
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10 is below the 11 tokens of a row",
        ),
        (
            ["trainer.save_freq=2", "trainer.keep_best=val/exact_matc"],
            "trainer.keep_best: the validation has no metric val/exact_matc; did you mean val/exact_match?",
        ),
        (
            ["trainer.save_freq=2", "trainer.keep_best=val/score/mean", "data.train_files=rows.jsonl"],
            "trainer.keep_best=val/score/mean needs prompts to validate on; set data.val_files",
        ),
    ],
)
def test_a_mistake_ends_with_one_clear_line_before_any_step(here, capsys, overrides, message):
    with pytest.raises(SystemExit) as caught:
        train("trainer.default_local_dir=run", *overrides)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert message in one_line(captured.err)
    assert "Traceback" not in captured.err
    assert not (here / "run" / "metrics.jsonl").exists()


def test_a_reward_that_raises_names_the_row_at_its_step(here, capsys):
    with pytest.raises(SystemExit) as caught:
        train(
            "trainer.default_local_dir=run",
            "data.train_files=rows.jsonl",
            "reward.custom_reward_function.path=mine.py",
            "reward.custom_reward_function.name=broken",
        )
    assert caught.value.code == 2
    error = one_line(capsys.readouterr().err)
    assert "row 0" in error
    assert "'sums'" in error
    assert "KeyError: 'oops'" in error


@pytest.mark.parametrize("left", ["metrics.jsonl", "model"])
def test_a_second_run_in_the_same_folder_is_refused(here, capsys, left):
    (here / "run").mkdir()
    (here / "run" / left).touch()
    with pytest.raises(SystemExit):
        train("trainer.default_local_dir=run")
    assert "holds a run already" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "nowhere", "1"], "no model folder nowhere"),
        (["generate", "model", "1x"], "prompt '1x': the tokenizer has no token for ['x']"),
        (["generate", "model", "1", "--temperature", "-1"], "the temperature 0 (the most probable token) or above"),
        (["generate", "model", "1", "--max-new-tokens", "0"], "max_new_tokens is 1 or more"),
        (["generate", "model", "1", "--stop", "1<eos>"], "the stop string '1<eos>' never comes"),
    ],
)
def test_generate_says_what_it_cannot_use(here, capsys, arguments, message, tokenizer, policy):
    policy.save_pretrained(here / "model")
    build_character_tokenizer("0123456789").save_pretrained(here / "model")
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in one_line(capsys.readouterr().err)


def test_an_answer_ends_at_a_stop_string_of_the_command_or_of_the_run(here, capsys, policy):
    policy.save_pretrained(here / "run" / "model")
    build_character_tokenizer("0123456789").save_pretrained(here / "run" / "model")

    def answer(*options: str) -> str:
        main(["generate", "run", "12", "--temperature", "1.0", "--max-new-tokens", "40", *options])
        return capsys.readouterr().out.strip()

    whole = answer()
    first, last = whole[3], whole[5]
    assert answer("--stop", first) == whole[: whole.index(first) + 1]
    assert answer("--stop", first, "--stop", last) == whole[: min(whole.index(first), whole.index(last)) + 1]
    (here / "run" / "config.yaml").write_text(f"actor_rollout_ref: {{rollout: {{stop: ['{last}']}}}}")
    assert answer() == whole[: whole.index(last) + 1]
    assert answer("--stop", first) == whole[: whole.index(first) + 1]


def test_a_temperature_of_zero_is_the_most_probable_token(here, capsys, policy):
    policy.save_pretrained(here / "model")
    build_character_tokenizer("0123456789").save_pretrained(here / "model")
    for options in ([], ["--temperature", "0"], ["--temperature", "0", "--seed", "2"]):
        main(["generate", "model", "12", *options])
    first, *others = capsys.readouterr().out.splitlines()
    assert others == [first, first]


def test_a_prompt_goes_through_the_chat_template_unless_it_is_raw(here, capsys, policy, monkeypatch):
    seen = []
    monkeypatch.setattr("kapell.trainer.generate.pad_left", lambda rows, pad: seen.append(rows) or pad_left(rows, pad))
    policy.save_pretrained(here / "run" / "model")
    tokenizer = build_character_tokenizer("0123456789")
    tokenizer.chat_template = "{% for message in messages %}9{{ message['content'] }}{% endfor %}{{ tail }}"
    tokenizer.save_pretrained(here / "run" / "model")
    (here / "run" / "config.yaml").write_text("data: {apply_chat_template_kwargs: {tail: '7'}}")
    main(["generate", "run", "12"])
    main(["generate", "run", "12", "--raw"])
    assert [tokenizer.decode(rows[0]) for rows in seen] == ["9127", "12<answer>"]


@pytest.mark.parametrize("columns", [None, "80"])
def test_the_configuration_is_shown_with_its_origins_and_each_key_in_full(here, capsys, monkeypatch, columns):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    key = "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"
    main(["config", f"{key}=7000"])
    line = next(line for line in capsys.readouterr().out.splitlines() if key in line)
    assert "7000" in line
    assert "command" in line
    main(["config"])
    line = next(line for line in capsys.readouterr().out.splitlines() if "trainer.keep_best " in line)
    assert "null" in line
