"""What training takes off rewards for the length of a response."""

import json

import pytest
import torch

from kapell.trainer.cli import main
from kapell.trainer.config_load import load_config
from kapell.trainer.length_penalties import LengthPenalties

EOS, OTHER_EOS, LENGTH = 1, 2, 4
# Three tokens, an end at the limit, another end there, cut at the limit, and a tool's token within.
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 1, 0]])
RESPONSES = torch.tensor([[5, 6, 7, 0], [5, 6, 7, EOS], [5, 6, 7, OTHER_EOS], [5, EOS, 6, 7], [5, 9, 6, 0]])


def test_a_response_is_penalised_on_its_last_token_for_its_length():
    penalties_BT, metrics = LengthPenalties(max_length=LENGTH, overlong_buffer=2, overlong_factor=0.5)(RESPONSES, MASK)
    half, whole = [0, 0, -0.25, 0], [0, 0, 0, -0.5]
    torch.testing.assert_close(penalties_BT, torch.tensor([half, whole, whole, whole, half]))
    assert metrics["critic/overlong_penalty/mean"].value == pytest.approx(-0.4)
    assert "critic/missing_eos_penalty/mean" not in metrics


def test_a_response_that_is_cut_off_is_penalised_and_one_that_ends_at_the_limit_is_not():
    penalties_BT, metrics = LengthPenalties(max_length=LENGTH, missing_eos=1.5, eos_token_ids={EOS, OTHER_EOS})(
        RESPONSES, MASK
    )
    assert penalties_BT.sum(-1).tolist() == [0, 0, 0, -1.5, 0]
    assert penalties_BT[3, 3] == -1.5
    assert metrics["critic/missing_eos_penalty/mean"].value == pytest.approx(-0.3)


def test_both_penalties_add_up():
    both = LengthPenalties(max_length=LENGTH, overlong_buffer=2, missing_eos=1.5, eos_token_ids=[EOS])
    assert both(RESPONSES, MASK)[0].sum(-1).tolist() == [-0.5, -1, -2.5, -2.5, -0.5]


@pytest.mark.parametrize("data_plane", ["value", "reference"])
def test_a_run_trains_on_penalised_rewards_and_shows_the_scores_beside_them(tmp_path, data_plane):
    main(
        [
            "train",
            "backend=local",
            "trainer.n_gpus_per_node=1",
            "trainer.total_training_steps=2",
            f"trainer.default_local_dir={tmp_path}",
            f"trainer.data_plane={data_plane}",
            "trainer.logger=[file]",
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.model.hidden_size=16",
            "reward.overlong_buffer.enable=true",
            "reward.overlong_buffer.len=6",
            "reward.overlong_buffer.penalty_factor=0.5",
            "reward.missing_eos_penalty=0.25",
            "actor_rollout_ref.actor.target_kl=1e-12",
        ]
    )
    steps = [line for line in map(json.loads, (tmp_path / "metrics.jsonl").open()) if "critic/score/mean" in line]
    assert len(steps) == 2
    for line in steps:
        penalty = line["critic/overlong_penalty/mean"] + line["critic/missing_eos_penalty/mean"]
        # A new model's responses have random lengths up to 6; each token of them costs a twelfth.
        assert line["critic/overlong_penalty/mean"] == pytest.approx(-line["response_length/mean"] / 12, abs=1e-6)
        assert line["critic/rewards/mean"] == pytest.approx(line["critic/score/mean"] + penalty, abs=1e-6)
        assert -0.25 <= line["critic/missing_eos_penalty/mean"] <= -0.25 * (line["response_length/clip_ratio"] - 0.5)
        assert line["actor/approx_kl"] > 0
        assert line["actor/ppo_epochs"] == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.overlong_buffer.enable=true"], "enable=true needs len"),
        (
            ["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=7"],
            "reward.overlong_buffer.len=7 is more than data.max_response_length=6",
        ),
        (["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=-1"], "len must not be negative"),
        (["reward.missing_eos_penalty=-1"], "missing_eos_penalty must be above 0"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_config(overrides=overrides)
