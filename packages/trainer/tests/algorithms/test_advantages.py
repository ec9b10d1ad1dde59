"""Worked numbers of every estimator."""

import math
import uuid

import numpy as np
import pytest
import torch

from kapell.trainer.algorithms import (
    Metric,
    NormScope,
    advantage_estimators,
    compute_advantages,
    mask_from_lengths,
    rewards_to_go,
    sum_pi_squared_from_logits,
)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, tensor(expected), atol=1e-6, rtol=0)


def outcome_columns(scores, uid, lengths):
    """Each row's score on its last token."""
    mask = mask_from_lengths(torch.tensor(lengths), max(lengths))
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    for row, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        rewards[row, length - 1] = score
    return {"token_level_rewards": rewards, "response_mask": mask, "uid": uid}


@pytest.fixture
def columns():
    return outcome_columns([1, 0, 0, 1, 0.2, 0.4, 5], list("aaaabbc"), [4, 2, 2, 4, 1, 3, 2])


def row_advantages(name, columns, **options):
    result = compute_advantages(name, columns, options)
    mask = columns["response_mask"].bool()
    per_row = result.advantages[:, 0]
    assert torch.equal(result.advantages, torch.where(mask, per_row[:, None], 0.0)), "one scalar over the row's tokens"
    return per_row, result.metrics


GROUP_GOLDEN = [
    ("grpo", {}, [0.866024, -0.866024, -0.866024, 0.866024, -0.707102, 0.707102, 0]),
    ("grpo", {"unbiased_std": False}, [0.999998, -0.999998, -0.999998, 0.999998, -0.99999, 0.99999, 0]),
    ("grpo", {"norm_scope": "none"}, [0.5, -0.5, -0.5, 0.5, -0.1, 0.1, 0]),
    ("dr_grpo", {}, [0.5, -0.5, -0.5, 0.5, -0.1, 0.1, 0]),
    ("rloo", {}, [0.666667, -0.666667, -0.666667, 0.666667, -0.2, 0.2, 0]),
    ("opo", {}, [0.333333, -0.666667, -0.666667, 0.333333, -0.15, 0.05, 0]),
    ("grpo_passk", {}, [0, 0, 0, 0, 0, 1.414204, 0]),
    ("grpo_passk", {"norm_scope": "none"}, [0, 0, 0, 0, 0, 0.2, 0]),
]


@pytest.mark.parametrize(("name", "options", "expected"), GROUP_GOLDEN)
def test_group_estimators_match_the_worked_numbers(columns, name, options, expected):
    per_row, metrics = row_advantages(name, columns, **options)
    close(per_row, expected)
    assert metrics == {"adv/singleton_groups": Metric.sum(1)}


def test_grpo_over_the_batch_divides_by_the_spread_of_all_scores(columns):
    scores = tensor([1, 0, 0, 1, 0.2, 0.4, 5])
    per_row, _ = row_advantages("grpo", columns, norm_scope="batch")
    close(per_row, (tensor([0.5, -0.5, -0.5, 0.5, -0.1, 0.1, 0]) / (scores.std() + 1e-6)).tolist())


def test_gpg_scales_by_the_share_of_groups_with_spread():
    per_row, _ = row_advantages("gpg", outcome_columns([1, 0, 0, 1, 0, 0], list("aaaabb"), [1] * 6))
    close(per_row, [0.75, -0.75, -0.75, 0.75, 0, 0])
    halved, _ = row_advantages("gpg", outcome_columns([1, 0, 0, 1, 0, 0], list("aaaabb"), [1] * 6), f_norm=2.0)
    close(halved, [0.375, -0.375, -0.375, 0.375, 0, 0])


GAE_REWARDS = [[0, 0, 0, 1], [0, 0, 1, 0]]
GAE_VALUES = [[0.5, 0.6, 0.7, 0.8], [0.2, 9, 0.4, 9]]
GAE_MASK = [[1, 1, 1, 1], [1, 0, 1, 0]]


def gae(rewards, values, mask, **options):
    columns = {
        "token_level_rewards": tensor(rewards),
        "values": tensor(values),
        "response_mask": torch.tensor(mask),
    }
    return compute_advantages("gae", columns, options)


def test_gae_matches_the_worked_numbers():
    raw = gae(GAE_REWARDS, GAE_VALUES, GAE_MASK, gamma=0.9, lam=0.8, norm_scope="none")
    close(raw.advantages, [[0.146618, 0.14808, 0.164, 0.2], [0.592, 0, 0.6, 0]])
    close(raw.returns, [[0.646618, 0.74808, 0.864, 1], [0.792, 0, 1, 0]])
    white = gae(GAE_REWARDS, GAE_VALUES, GAE_MASK, gamma=0.9, lam=0.8)
    close(white.advantages, [[-0.723825, -0.717284, -0.646079, -0.485062], [1.268234, 0, 1.304016, 0]])
    close(white.returns, raw.returns.tolist())


def test_gae_of_one_and_one_returns_rewards_to_go():
    result = gae(GAE_REWARDS, GAE_VALUES, GAE_MASK, norm_scope="none")
    close(result.advantages, [[0.5, 0.4, 0.3, 0.2], [0.8, 0, 0.6, 0]])
    close(result.returns, [[1, 1, 1, 1], [1, 0, 1, 0]])
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(6, 9, generator=generator) < 0.7).long()
    rewards = torch.randn(6, 9, generator=generator, dtype=torch.float64) * mask
    values = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    columns = {"token_level_rewards": rewards, "values": values, "response_mask": mask}
    torch.testing.assert_close(compute_advantages("gae", columns).returns, rewards_to_go(rewards, mask))


@pytest.mark.parametrize("hidden", [7.0, math.nan, math.inf])
def test_gae_passes_over_observation_tokens(hidden):
    first = gae([[0, 0, 0, 1]], [[0, 0, 0, 0]], [[1, 0, 0, 1]], gamma=0.5, norm_scope="none")
    close(first.advantages, [[0.5, 0, 0, 1]])
    second = gae([[0, 0, 0, 1]], [[0.5, hidden, hidden, 0.25]], [[1, 0, 0, 1]], lam=0.0, norm_scope="none")
    close(second.advantages, [[-0.25, 0, 0, 0.75]])
    close(second.returns, [[0.25, 0, 0, 1]])


def test_reinforce_plus_plus_matches_the_worked_numbers():
    columns = {
        "token_level_rewards": tensor([[0, 0, 1], [-0.1, -0.1, 0]]),
        "response_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
    }
    result = compute_advantages("reinforce_plus_plus", columns, {"gamma": 0.9})
    close(result.returns, [[0.81, 0.9, 1], [-0.19, -0.1, 0]])
    close(result.advantages, [[0.563049, 0.718492, 0.891206], [-1.164095, -1.008652, 0]])


def test_reinforce_plus_plus_baseline_matches_the_worked_numbers():
    columns = outcome_columns([1, 0, 1, 1], list("aabb"), [2, 1, 2, 1])
    result = compute_advantages("reinforce_plus_plus_baseline", columns)
    close(result.advantages, [[1.107019, 1.107019], [-1.549826, 0], [-0.221404, -0.221404], [-0.221404, 0]])


def test_remax_matches_the_worked_numbers():
    columns = {
        "token_level_rewards": tensor([[0, 0.5, 1]]),
        "response_mask": torch.ones(1, 3),
        "reward_baselines": tensor([0.7]),
    }
    close(compute_advantages("remax", columns).advantages, [[0.8, 0.8, 0.3]])


def test_gdpo_does_not_change_when_one_component_is_rescaled():
    columns = outcome_columns([1, 0, 0, 1, 0.2, 0.4], list("aaaabb"), [4, 2, 2, 4, 1, 3])
    components = tensor([[1, 0.3], [0, 0.2], [0, 0.5], [1, 0.1], [0, 0.1], [1, 0.3]])
    scaled = components * tensor([1, 1000])
    plain = compute_advantages("gdpo", columns | {"reward_components": components})
    rescaled = compute_advantages("gdpo", columns | {"reward_components": scaled})
    torch.testing.assert_close(plain.advantages, rescaled.advantages, atol=2e-5, rtol=0)
    only_first = compute_advantages(
        "gdpo", columns | {"reward_components": components}, {"component_weights": [1.0, 0.0], "norm_scope": "none"}
    )
    grpo = compute_advantages("grpo", outcome_columns([1, 0, 0, 1, 0, 1], columns["uid"], [4, 2, 2, 4, 1, 3]))
    torch.testing.assert_close(only_first.advantages, grpo.advantages)


def test_gdpo_wants_one_weight_per_component(columns):
    columns["reward_components"] = torch.zeros(7, 2)
    with pytest.raises(ValueError, match="3 component_weights for 2 reward components"):
        compute_advantages("gdpo", columns, {"component_weights": [1, 2, 3]})


def test_optimal_token_baseline_by_hand():
    """Three rows of one prompt, W from p and sum p^2; the third is alone from its third token on."""
    half = math.log(0.5)
    columns = outcome_columns([1, 0.5, 2], list("aaa"), [2, 1, 3]) | {
        "old_log_probs": tensor([[half, half, 0], [half, 0, 0], [half, half, half]]),
        # w = 1 - 2p + sum p^2 = sum p^2 with p = 1/2
        "sum_pi_squared": tensor([[0.2, 0.4, 0], [0.6, 0, 0], [0.2, 0.2, 0.2]]),
    }
    # First token: (1*.2 + .5*.6 + 2*.2)/1 = .9. Second: W = .6 and .4, (1*.6 + 2*.4)/1 = 1.4. Third: baseline 0.
    expected = [[0.1, -0.4, 0], [-0.4, 0, 0], [1.1, 0.6, 2]]
    close(compute_advantages("optimal_token_baseline", columns).advantages, expected)


def test_sum_of_squared_probabilities_matches_the_worked_number():
    close(sum_pi_squared_from_logits(tensor([2, 1, 0, -1])), 0.479361)


GROUP_ESTIMATORS = [
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "grpo_passk",
    "gpg",
    "reinforce_plus_plus_baseline",
    "gdpo",
    "optimal_token_baseline",
]


def extended(columns):
    rewards = columns["token_level_rewards"]
    generator = torch.Generator().manual_seed(3)
    return columns | {
        "values": torch.rand(rewards.shape, generator=generator, dtype=torch.float64),
        "reward_baselines": torch.zeros(len(rewards), dtype=torch.float64),
        "reward_components": torch.stack([rewards.sum(-1), 2 * rewards.sum(-1)], dim=-1),
        "old_log_probs": -torch.rand(rewards.shape, generator=generator, dtype=torch.float64),
        "sum_pi_squared": torch.rand(rewards.shape, generator=generator, dtype=torch.float64),
    }


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_group_of_one_has_advantage_zero_and_is_counted(columns, name):
    result = compute_advantages(name, extended(columns))
    assert result.advantages[6].tolist() == [0, 0, 0, 0]
    assert result.metrics["adv/singleton_groups"].value == 1
    assert result.advantages.isfinite().all()


@pytest.mark.parametrize("name", sorted(set(GROUP_ESTIMATORS) - {"optimal_token_baseline"}))
@pytest.mark.parametrize("score", [5.0, 0.1, 1e-9])
def test_groups_without_spread_give_exactly_zero(name, score):
    columns = outcome_columns([score] * 3 + [score] * 3, list("aaabbb"), [2, 1, 2, 1, 2, 2])
    assert not compute_advantages(name, extended(columns)).advantages.any()


def test_two_answers_of_scores_one_and_zero():
    per_row, _ = row_advantages("grpo", outcome_columns([1, 0, 2], ["a", "a", "b"], [1, 1, 1]))
    close(per_row, [0.7071057, -0.7071057, 0])


def test_rloo_is_dr_grpo_times_k_over_k_minus_one():
    scores = torch.randn(12, generator=torch.Generator().manual_seed(0)).tolist()
    columns = outcome_columns(scores, [0] * 4 + [1] * 8, [1] * 12)
    dr_grpo, _ = row_advantages("dr_grpo", columns)
    rloo, _ = row_advantages("rloo", columns)
    torch.testing.assert_close(rloo, dr_grpo * torch.tensor([4 / 3] * 4 + [8 / 7] * 8, dtype=torch.float64))


def test_grpo_does_not_change_under_affine_rewards(columns):
    moved = columns | {"token_level_rewards": columns["token_level_rewards"].clone()}
    lengths = columns["response_mask"].sum(-1)
    moved["token_level_rewards"][torch.arange(7), lengths - 1] *= 3
    moved["token_level_rewards"][torch.arange(7), lengths - 1] += 10
    torch.testing.assert_close(
        compute_advantages("grpo", columns).advantages, compute_advantages("grpo", moved).advantages, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("name", sorted(advantage_estimators))
@pytest.mark.parametrize("reward", [1.0, math.nan])
def test_a_reward_on_a_masked_token_is_an_error(columns, name, reward):
    columns["token_level_rewards"][1, 3] = reward
    with pytest.raises(ValueError, match="row 1, token 3"):
        compute_advantages(name, extended(columns))


@pytest.mark.parametrize("name", sorted(advantage_estimators))
def test_an_empty_mask_gives_zeros(columns, name):
    columns = extended(columns)
    columns["response_mask"] = torch.zeros_like(columns["response_mask"])
    columns["token_level_rewards"] = torch.zeros_like(columns["token_level_rewards"])
    result = compute_advantages(name, columns)
    assert not result.advantages.any()
    assert not result.returns.any()


@pytest.mark.parametrize("name", sorted(advantage_estimators))
def test_no_rows_give_no_rows(columns, name):
    empty = {key: column[:0] for key, column in extended(columns).items()}
    assert compute_advantages(name, empty).advantages.shape == (0, 4)


@pytest.mark.parametrize("name", sorted(advantage_estimators))
def test_half_precision_rewards_are_widened(columns, name):
    half = {
        key: column.bfloat16() if isinstance(column, torch.Tensor) and column.is_floating_point() else column
        for key, column in extended(columns).items()
    }
    single = {key: column.float() if isinstance(column, torch.Tensor) else column for key, column in half.items()}
    result = compute_advantages(name, half)
    assert result.advantages.dtype == torch.float32
    torch.testing.assert_close(result.advantages, compute_advantages(name, single).advantages)


def test_a_row_without_tokens_stays_out_of_its_group():
    columns = outcome_columns([1, 0, 0], list("aaa"), [1, 1, 1])
    columns["response_mask"][2] = 0
    per_row, _ = row_advantages("dr_grpo", columns)
    close(per_row, [0.5, -0.5, 0])


@pytest.mark.parametrize(
    "ids",
    [
        [3, 3, 3, 3, 1, 1, 2],
        [uuid.UUID(int=int(c)) for c in "3333112"],
        np.array(list("xxxxyyz"), dtype=object),
        np.array(list("xxxxyyz")),
        torch.tensor([3, 3, 3, 3, 1, 1, 2]),
    ],
    ids=["int", "uuid", "object array", "text array", "tensor"],
)
def test_groups_are_told_by_id_of_any_kind(columns, ids):
    per_row, _ = row_advantages("dr_grpo", columns | {"uid": ids})
    close(per_row, [0.5, -0.5, -0.5, 0.5, -0.1, 0.1, 0])


def test_groups_of_uneven_size_in_any_order_are_normalised_by_themselves():
    scores = [1, 0, 1, 0, 5, 5, 5, 3, 1, 2, 9]
    columns = outcome_columns(scores, list("aaaabbbcccc"), [1] * 11)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(1))
    shuffled = {
        "token_level_rewards": columns["token_level_rewards"][order],
        "response_mask": columns["response_mask"][order],
        "uid": [columns["uid"][i] for i in order],
    }
    plain, _ = row_advantages("grpo", columns)
    moved, _ = row_advantages("grpo", shuffled)
    torch.testing.assert_close(plain[order], moved)
    assert plain[4:7].tolist() == [0, 0, 0]


def test_a_missing_id_is_an_error(columns):
    with pytest.raises(ValueError, match="row 2 has no group id"):
        compute_advantages("grpo", columns | {"uid": ["a", "a", None, "a", "b", "b", "c"]})
    with pytest.raises(ValueError, match="3 group ids for 7 rows"):
        compute_advantages("grpo", columns | {"uid": list("abc")})


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"])
def test_scope_of_normalisation_of_whitened_estimators(columns, name):
    columns = extended(columns)
    raw = compute_advantages(name, columns, {"norm_scope": "none"}).advantages
    later = compute_advantages(name, columns, {"norm_scope": NormScope.MINI_BATCH}).advantages
    assert torch.equal(raw, later)
    white = compute_advantages(name, columns, {"norm_scope": "batch"}).advantages
    assert not torch.allclose(raw, white)
    with pytest.raises(ValueError, match="norm_scope"):
        compute_advantages(name, columns, {"norm_scope": "group"})
    with pytest.raises(ValueError, match="known: none, group, batch, mini-batch"):
        compute_advantages(name, columns, {"norm_scope": "groups"})


def test_a_batch_of_one_token_keeps_its_raw_advantage():
    close(gae([[1, 0]], [[0.25, 9]], [[1, 0]]).advantages, [[0.75, 0]])
