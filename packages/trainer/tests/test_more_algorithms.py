"""Algorithms that need more than the common stages: whole small runs, their columns compared with the kernels."""

import json

import pytest
import torch

from kapell.trainer.algorithms import compute_advantages, correct_rollout, masked_whiten, outcome_scores
from kapell.trainer.build import prepare, train
from kapell.trainer.choices import check_algorithms
from kapell.trainer.config_load import load_config
from kapell.trainer.engine import TrainEngine
from kapell.trainer.objectives import PolicyObjective
from kapell.trainer.run_folder import RunFiles
from kapell.trainer.stages import Stages
from kapell.trainer.workers import ActorRolloutRefWorker

SMALL = [
    "backend=local",
    "trainer.n_gpus_per_node=2",
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_epochs=1",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.model.hidden_size=16",
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs with some overrides; the batches that reached the update, and the metrics of each step."""

    def run_with(*overrides, folder="run"):
        batches, update = [], Stages.update_actor

        def recording(self, batch, step):
            batches.append(batch)
            return update(self, batch, step)

        with monkeypatch.context() as patch:
            patch.setattr(Stages, "update_actor", recording)
            target = tmp_path / folder
            target.mkdir()
            config = load_config(overrides=[*SMALL, *overrides]).config
            train(prepare(config, target), target, hooks=[RunFiles(target)])
        lines = (target / "metrics.jsonl").read_text().splitlines()
        return batches, [json.loads(line) for line in lines]

    return run_with


def columns_of(batch):
    return {name: batch.column(name) for name in batch.columns}


def noisy_sampler(monkeypatch):
    """The sampler's log-probabilities are off, as an engine with other arithmetic has them."""
    sample = Stages.sample

    def noisy(self, *args, **kwargs):
        batch = sample(self, *args, **kwargs)
        noise = 0.5 * torch.randn(batch.column("responses").shape, generator=torch.Generator().manual_seed(1))
        batch.batch["rollout_log_probs"] += noise * batch.column("response_mask")
        return batch

    monkeypatch.setattr(Stages, "sample", noisy)


def test_remax_compares_with_the_score_of_the_greedy_answer(run, monkeypatch):
    greedy, sample = [], Stages.sample

    def watched(self, prompts, sampling, num_samples, step):
        batch = sample(self, prompts, sampling, num_samples, step)
        if not sampling.do_sample:
            scored = self.scorer(batch)
            greedy.append(dict(zip(scored.column("uid"), scored.column("rm_scores").sum(-1).tolist(), strict=True)))
        return batch

    monkeypatch.setattr(Stages, "sample", watched)
    batches, metrics = run("algorithm.adv_estimator=remax")
    assert len(greedy) == 2
    for batch, scores in zip(batches, greedy, strict=True):
        baselines = torch.tensor([scores[uid] for uid in batch.column("uid")])
        assert torch.equal(batch.column("reward_baselines"), baselines)
        first_tokens = outcome_scores(batch.column("rm_scores"), batch.column("response_mask")) - baselines
        assert torch.allclose(batch.column("advantages")[:, 0], first_tokens)
    assert {"timing_s/gen_max", "critic/reward_baselines/mean"} <= metrics[0].keys()


def test_the_optimal_token_baseline_gets_the_squared_probabilities_of_its_own_policy(run, monkeypatch):
    models, build = [], ActorRolloutRefWorker.__init__

    def watched(self, *args, **kwargs):
        build(self, *args, **kwargs)
        models.append(self.engine.model)

    monkeypatch.setattr(ActorRolloutRefWorker, "__init__", watched)
    frozen = "actor_rollout_ref.actor.optim.lr=1e-12"
    (batch, _), _ = run("algorithm.adv_estimator=optimal_token_baseline", frozen)
    with torch.no_grad():
        output = models[0](
            batch.column("input_ids"),
            attention_mask=batch.column("attention_mask"),
            position_ids=batch.column("position_ids"),
        )
    length = batch.column("responses").shape[1]
    wanted = output.logits[:, -length - 1 : -1].softmax(-1).square().sum(-1) * batch.column("response_mask")
    assert torch.allclose(batch.column("sum_pi_squared"), wanted, atol=1e-5)
    expected = compute_advantages("optimal_token_baseline", columns_of(batch))
    assert torch.equal(batch.column("advantages"), expected.advantages)


def test_without_an_estimator_that_reads_them_no_squared_probabilities_are_made(run):
    (batch, _), _ = run()
    assert "sum_pi_squared" not in batch.columns
    assert "loss_mask" not in batch.columns
    assert "rollout_is_weights" not in batch.columns


def test_advantages_are_scaled_over_each_mini_batch(run, monkeypatch):
    seen, objective = [], PolicyObjective.__call__

    def watched(self, model, columns, totals):
        seen.append((columns["advantages"], columns["response_mask"]))
        return objective(self, model, columns, totals)

    monkeypatch.setattr(PolicyObjective, "__call__", watched)
    one_worker = ["trainer.n_gpus_per_node=1", "trainer.total_training_steps=1"]
    batches, _ = run("algorithm.norm_scope=mini-batch", "actor_rollout_ref.actor.shuffle=false", *one_worker)
    (batch,) = batches
    plain = compute_advantages("grpo", columns_of(batch), {"norm_scope": "none"}).advantages
    assert torch.equal(batch.column("advantages"), plain)
    assert len(seen) == 2
    for (advantages, mask), rows in zip(seen, (slice(0, 8), slice(8, 16)), strict=True):
        assert torch.allclose(advantages, masked_whiten(plain[rows], mask))


@pytest.mark.parametrize(
    "choice",
    [
        {"rollout_is": "token", "rollout_is_threshold": 1.2},
        {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
        {"rollout_is": "token", "rollout_is_threshold": "0.8_1.25"},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.4"},
        {"rollout_is": "sequence", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.1},
    ],
)
def test_weights_and_rejection_are_those_of_the_kernel(run, monkeypatch, choice):
    noisy_sampler(monkeypatch)
    batches, metrics = run(*(f"algorithm.rollout_correction.{key}={value}" for key, value in choice.items()))
    for batch, record in zip(batches, metrics, strict=True):
        columns = [batch.column(name) for name in ("old_log_probs", "rollout_log_probs", "response_mask")]
        expected = correct_rollout(*columns, **choice)
        assert ("rollout_is_weights" in batch.columns) == ("rollout_is" in choice)
        assert ("loss_mask" in batch.columns) == ("rollout_rs" in choice)
        if "rollout_is" in choice:
            assert torch.equal(batch.column("rollout_is_weights"), expected.rollout_is_weights)
        if "rollout_rs" in choice:
            assert torch.equal(batch.column("loss_mask"), expected.loss_mask)
            assert 0 < expected.loss_mask.sum() < batch.column("response_mask").sum()
        for name, metric in expected.metrics.items():
            assert record[name] == pytest.approx(metric.value, abs=1e-6)


@pytest.mark.parametrize("overrides", [["rollout_is=token"], ["rollout_rs=token_k1", "rollout_rs_threshold=0.7_1.4"]])
def test_a_correction_changes_what_is_learned(run, monkeypatch, overrides):
    noisy_sampler(monkeypatch)
    _, plain = run(folder="plain")
    _, corrected = run(*(f"algorithm.rollout_correction.{override}" for override in overrides), folder="corrected")
    assert plain[0]["critic/score/mean"] == corrected[0]["critic/score/mean"]
    assert abs(plain[0]["actor/grad_norm"] - corrected[0]["actor/grad_norm"]) > 1e-4
    assert plain[0]["rollout_corr/kl"] == corrected[0]["rollout_corr/kl"] != 0


def test_micro_batches_and_workers_do_not_change_a_corrected_update(run, monkeypatch):
    noisy_sampler(monkeypatch)
    correction = ["algorithm.rollout_correction.rollout_rs=seq_mean_k3"]
    correction.append("algorithm.rollout_correction.rollout_rs_threshold=0.1")
    _, whole = run(*correction, "trainer.n_gpus_per_node=1", folder="whole")
    _, parts = run(*correction, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", folder="parts")
    for name in ("actor/pg_loss", "actor/entropy", "actor/grad_norm", "rollout_corr/rollout_rs_masked_fraction"):
        assert [record[name] for record in parts] == pytest.approx([record[name] for record in whole], abs=1e-5)


def test_bypass_takes_the_samplers_log_probs_and_saves_the_pass(run, monkeypatch):
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    _, decoupled = run(folder="decoupled")
    monkeypatch.setattr(TrainEngine, "evaluate", None)
    batches, metrics = run(bypass, folder="bypass")
    for batch in batches:
        assert torch.equal(batch.column("old_log_probs"), batch.column("rollout_log_probs"))
        assert "entropys" not in batch.columns
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
        assert metrics[1][name] == pytest.approx(decoupled[1][name], abs=1e-4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout_correction.rollout_is=tokens"], "unknown level of importance weights 'tokens'"),
        (["rollout_correction.rollout_rs=token_k1"], "needs a rollout_rs_threshold"),
        (["rollout_correction.rollout_rs=k9", "rollout_correction.rollout_rs_threshold=2"], "unknown rejection"),
        (["rollout_correction.bypass_mode=true", "rollout_correction.rollout_is=token"], "correct in the loss"),
        (["rollout_correction.bypass_mode=true", "adv_estimator=optimal_token_baseline"], "sum_pi_squared"),
        (["norm_scope=batches"], "unknown scope of normalisation 'batches'"),
        (["norm_scope=mini-batch", "adv_estimator=rloo"], "rloo scales over nothing else"),
        (["norm_scope=group", "adv_estimator=gae"], "this estimator has no groups"),
    ],
)
def test_a_choice_that_cannot_run_is_refused_beforehand(overrides, message):
    config = load_config(overrides=[f"algorithm.{override}" for override in overrides]).config
    with pytest.raises(ValueError, match=message):
        check_algorithms(config)


def test_two_bounds_on_the_command_line_are_no_number():
    key = "algorithm.rollout_correction.rollout_is_threshold"
    assert load_config(overrides=[f"{key}=0.5_2"]).config.algorithm.rollout_correction.rollout_is_threshold == "0.5_2"
    assert load_config(overrides=[f"{key}=3"]).config.algorithm.rollout_correction.rollout_is_threshold == 3.0


def test_stop_strings_of_the_configuration_end_responses_in_training(run):
    digits = "['0','1','2','3','4']"
    (batch, _), _ = run(f"actor_rollout_ref.rollout.stop={digits}")
    texts = batch.column("solution_str")
    assert not any(set(text[:-1]) & set("01234") for text in texts)
    assert any(text[-1:] in set("01234") for text in texts)
