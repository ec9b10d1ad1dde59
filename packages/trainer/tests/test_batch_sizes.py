"""Which sizes of passes a configuration asks for, and that runs keep to them."""

import json

import pytest

from kapell.trainer.batch_sizes import batch_sizes
from kapell.trainer.build import prepare, train
from kapell.trainer.config_load import load_config
from kapell.trainer.forward import policy_forward, value_forward
from kapell.trainer.micro_batches import MicroBatches
from kapell.trainer.run_folder import RunFiles

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{group}" for group in ("actor", "rollout", "ref"))
SMALL = [
    "backend=local",
    "trainer.n_gpus_per_node=2",
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "data.train_batch_size=4",
    f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ROLLOUT}.n=4",
    "actor_rollout_ref.model.hidden_size=16",
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
]


def sizes_of(*overrides):
    return batch_sizes(load_config(overrides=overrides).config)


def test_the_actors_choice_is_inherited_by_the_others():
    sizes = sizes_of(f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=30")
    assert {*vars(sizes).values()} == {MicroBatches(max_tokens=30)}
    assert {*vars(sizes_of()).values()} == {MicroBatches()}


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        ([f"{ROLLOUT}.log_prob_use_dynamic_bsz=true"], {"log_prob": 30, "ref": 30}),
        (
            [f"{ROLLOUT}.log_prob_use_dynamic_bsz=true", f"{ROLLOUT}.log_prob_max_token_len_per_gpu=40"],
            {"log_prob": 40},
        ),
        ([f"{REF}.log_prob_use_dynamic_bsz=true", f"{REF}.log_prob_max_token_len_per_gpu=50"], {"ref": 50}),
        (["critic.use_dynamic_bsz=true"], {"critic": 30, "values": 30}),
        (["critic.use_dynamic_bsz=true", "critic.ppo_max_token_len_per_gpu=60"], {"critic": 60, "values": 60}),
        (["critic.use_dynamic_bsz=true", "critic.forward_max_token_len_per_gpu=70"], {"critic": 30, "values": 70}),
    ],
)
def test_each_pass_has_a_choice_of_its_own(overrides, changed):
    sizes = vars(sizes_of(f"{ACTOR}.ppo_max_token_len_per_gpu=30", *overrides))
    assert sizes["actor"] == MicroBatches()
    for role, tokens in changed.items():
        assert sizes[role] == MicroBatches(max_tokens=tokens)


def test_sizes_by_rows_are_each_roles_own():
    sizes = sizes_of(
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=2",
        f"{REF}.log_prob_micro_batch_size_per_gpu=3",
        "critic.ppo_micro_batch_size_per_gpu=4",
        "critic.forward_micro_batch_size_per_gpu=5",
    )
    assert [size.max_rows for size in vars(sizes).values()] == [1, 2, 3, 4, 5]


def run(folder, *overrides):
    folder.mkdir()
    config = load_config(overrides=[*SMALL, *overrides]).config
    train(prepare(config, folder), folder, hooks=[RunFiles(folder)])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def numbers(record):
    return {name: value for name, value in record.items() if not name.startswith(("timing_s/", "perf/"))}


def test_a_run_by_tokens_keeps_its_budget_in_every_pass_and_learns_the_same(tmp_path, monkeypatch):
    tokens = []

    def watched(forward):
        def run_forward(model, columns, **options):
            tokens.append(int(columns["attention_mask"].sum()))
            return forward(model, columns, **options)

        return run_forward

    for module in ("objectives", "workers"):
        monkeypatch.setattr(f"kapell.trainer.{module}.policy_forward", watched(policy_forward))
        monkeypatch.setattr(f"kapell.trainer.{module}.value_forward", watched(value_forward))
    whole = run(tmp_path / "whole")
    most = max(tokens)
    tokens.clear()
    budget = [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=24"]
    by_tokens = run(tmp_path / "tokens", *budget)
    assert 11 <= max(tokens) <= 24 < most
    for before, after in zip(whole, by_tokens, strict=True):
        assert numbers(after) == pytest.approx(numbers(before), abs=1e-4)


def test_workers_get_as_many_tokens_as_the_others_unless_told_otherwise(tmp_path, monkeypatch):
    seen = []

    def watched(model, columns, **options):
        seen.append(int(columns["attention_mask"].sum()))
        return policy_forward(model, columns, **options)

    monkeypatch.setattr("kapell.trainer.objectives.policy_forward", watched)
    balanced = run(tmp_path / "balanced")
    gaps = [abs(first - second) for first, second in zip(seen[::2], seen[1::2], strict=True)]
    seen.clear()
    plain = run(tmp_path / "plain", "trainer.balance_batch=false")
    plain_gaps = [abs(first - second) for first, second in zip(seen[::2], seen[1::2], strict=True)]
    assert sum(gaps) < sum(plain_gaps) / 2
    for before, after in zip(plain, balanced, strict=True):
        assert numbers(after) == pytest.approx(numbers(before), abs=1e-4)
