"""Rollout correction: worked numbers, separate loss mask, metrics."""

import math

import pytest
import torch

from kapell.trainer.algorithms import (
    REJECTION_STATISTICS,
    correct_rollout,
    importance_weights,
    merge_metrics,
    metric_values,
    mismatch_metrics,
    rejection_mask,
    rejection_statistic,
)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, tensor(expected), atol=1e-6, rtol=0)


OLD = tensor([[-1, -2, -0.5], [-1, -1, math.nan]])
ROLLOUT = tensor([[-1.2, -3, -0.5], [-0.5, -1.1, math.inf]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
RHO = [[1.221403, 2.718282, 1], [0.606531, 1.105171, 0]]


@pytest.mark.parametrize(
    ("level", "threshold", "expected"),
    [
        ("token", 100, RHO),
        ("token", 2.0, [[1.221403, 2, 1], [0.606531, 1.105171, 0]]),
        ("sequence", 100, [[3.320117] * 3, [0.67032, 0.67032, 0]]),
        ("sequence", 2, [[2, 2, 2], [0.67032, 0.67032, 0]]),
        ("geometric", 100, [[1.491825] * 3, [0.818731, 0.818731, 0]]),
        ("token", "0.5_2", [[1.221403, 0, 1], [0.606531, 1.105171, 0]]),
    ],
)
def test_weights_match_the_worked_numbers(level, threshold, expected):
    old = OLD.clone().requires_grad_()
    weights = importance_weights(old, ROLLOUT, MASK, level=level, threshold=threshold)
    close(weights, expected)
    assert not weights.requires_grad


def test_batch_normalised_weights_and_effective_sample_size():
    result = correct_rollout(
        OLD, ROLLOUT, MASK, rollout_is="token", rollout_is_threshold=2.0, rollout_is_batch_normalize=True
    )
    close(result.rollout_is_weights, [[1.029312, 1.685458, 0.842729], [0.511141, 0.93136, 0]])
    values = metric_values(result.metrics)
    assert values["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(0.871211, abs=1e-6)
    assert values["rollout_corr/rollout_is_max"] == 2


def test_sequence_weights_are_normalised_over_rows():
    result = correct_rollout(OLD, ROLLOUT, MASK, rollout_is="sequence", rollout_is_batch_normalize=True)
    mean = (2 + 0.67032) / 2
    close(result.rollout_is_weights, [[2 / mean] * 3, [0.67032 / mean] * 2 + [0]])


def test_rejection_acts_on_the_loss_mask_and_never_on_the_response_mask():
    mask = MASK.clone()
    result = correct_rollout(OLD, ROLLOUT, mask, rollout_rs="token_k1", rollout_rs_threshold="0.5_2")
    assert result.loss_mask.tolist() == [[True, False, True], [True, True, False]]
    assert torch.equal(mask, MASK)
    assert result.rollout_is_weights is None
    values = metric_values(result.metrics)
    assert values["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 5)
    assert values["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 2)


def test_bounds_of_k1_are_on_rollout_over_train():
    """rho is e on the second token: 1/rho = .37 passes a lower bound of .3 whatever the upper one is."""
    kept, _ = rejection_mask(OLD, ROLLOUT, MASK, statistics="token_k1", thresholds="0.3_1.2")
    assert kept.tolist() == [[True, True, True], [False, True, False]]
    symmetric, _ = rejection_mask(OLD, ROLLOUT, MASK, statistics="token_k1", thresholds=2.0)
    assert symmetric.tolist() == [[True, False, True], [True, True, False]]


STATISTICS = {
    "token_k1": [[-0.2, -1, 0], [0.5, -0.1, 0]],
    "token_k2": [[0.02, 0.5, 0], [0.125, 0.005, 0]],
    "token_k3": [[0.021403, 0.718282, 0], [0.106531, 0.005171, 0]],
    "seq_sum_k1": [[-1.2] * 3, [0.4, 0.4, 0]],
    "seq_sum_k2": [[0.52] * 3, [0.13, 0.13, 0]],
    "seq_sum_k3": [[0.739685] * 3, [0.111702, 0.111702, 0]],
    "seq_mean_k1": [[-0.4] * 3, [0.2, 0.2, 0]],
    "seq_mean_k2": [[0.173333] * 3, [0.065, 0.065, 0]],
    "seq_mean_k3": [[0.246562] * 3, [0.055851, 0.055851, 0]],
    "seq_max_k2": [[0.5] * 3, [0.125, 0.125, 0]],
    "seq_max_k3": [[0.718282] * 3, [0.106531, 0.106531, 0]],
}


@pytest.mark.parametrize("name", REJECTION_STATISTICS)
def test_each_statistic_matches_numbers_by_hand(name):
    close(rejection_statistic(OLD, ROLLOUT, MASK, name), STATISTICS[name])


def test_a_sequence_statistic_rejects_the_whole_row():
    kept, metrics = rejection_mask(OLD, ROLLOUT, MASK, statistics="seq_mean_k3", thresholds="0.1")
    assert kept.tolist() == [[False] * 3, [True, True, False]]
    assert metrics["rollout_corr/rollout_rs_seq_mean_k3_masked_fraction"].value == pytest.approx(3 / 5)


def test_several_statistics_must_all_pass():
    kept, _ = rejection_mask(OLD, ROLLOUT, MASK, statistics="token_k1,seq_max_k2", thresholds="0.5_2,0.2")
    assert kept.tolist() == [[False] * 3, [True, True, False]]


@pytest.mark.parametrize(
    ("statistics", "thresholds", "message"),
    [
        ("token_k4", "1", "unknown rejection statistic 'token_k4'"),
        ("token_k1,token_k2", "1,2,3", "2 statistics .* 3 thresholds"),
        ("token_k2", "0.5_2", "upper bound only"),
        ("token_k2", "-1", "positive number"),
        ("token_k1", "2_1", "0 < low <= high"),
        ("token_k1", "1_2_3", "'low_high'"),
        ("token_k1", "wide", "a number or 'low_high'"),
    ],
)
def test_mistakes_in_rejection_are_named(statistics, thresholds, message):
    with pytest.raises(ValueError, match=message):
        rejection_mask(OLD, ROLLOUT, MASK, statistics=statistics, thresholds=thresholds)


def test_rejection_needs_its_threshold():
    with pytest.raises(ValueError, match="rollout_rs_threshold"):
        correct_rollout(OLD, ROLLOUT, MASK, rollout_rs="token_k1")


def test_unknown_level_lists_the_known():
    with pytest.raises(ValueError, match="known: token, sequence, geometric"):
        importance_weights(OLD, ROLLOUT, MASK, level="tokens", threshold=2)


def test_mismatch_metrics_match_the_worked_numbers():
    values = metric_values(mismatch_metrics(OLD, ROLLOUT, MASK))
    for name, expected in {
        "kl": -0.16,
        "k3_kl": 0.170277,
        "training_ppl": 2.964776,
        "rollout_ppl": 3.508097,
        "log_ppl_diff": -0.1,
        "chi2_token": 1.294033,
    }.items():
        assert values[f"rollout_corr/{name}"] == pytest.approx(expected, abs=1e-6)


def test_mismatch_metrics_do_not_depend_on_the_split():
    whole = metric_values(mismatch_metrics(OLD, ROLLOUT, MASK))
    parts = [mismatch_metrics(OLD[i : i + 1], ROLLOUT[i : i + 1], MASK[i : i + 1]) for i in range(2)]
    assert metric_values(merge_metrics(parts)) == pytest.approx(whole)


def test_bypass_takes_the_samplers_log_probs():
    result = correct_rollout(ROLLOUT, ROLLOUT, MASK, bypass_mode=True)
    assert result.old_log_probs is ROLLOUT
    assert result.rollout_is_weights is None
    assert torch.equal(result.loss_mask, MASK.bool())
    assert metric_values(result.metrics)["rollout_corr/kl"] == 0
    with pytest.raises(ValueError, match="bypass_mode"):
        correct_rollout(ROLLOUT, ROLLOUT, MASK, bypass_mode=True, rollout_is="token")


def test_decoupled_keeps_the_recomputed_log_probs():
    assert correct_rollout(OLD, ROLLOUT, MASK, rollout_is="token").old_log_probs is OLD


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("gap", [100.0, -100.0])
def test_wild_ratios_and_empty_masks_stay_finite(level, gap):
    old, rollout = torch.zeros(2, 3), torch.full((2, 3), gap)
    for mask in (MASK, torch.zeros(2, 3)):
        result = correct_rollout(
            old,
            rollout,
            mask,
            rollout_is=level,
            rollout_is_batch_normalize=True,
            rollout_rs=",".join(REJECTION_STATISTICS),
            rollout_rs_threshold="2",
        )
        assert result.rollout_is_weights.isfinite().all()
        assert all(math.isfinite(value) for value in metric_values(result.metrics).values())


def test_half_precision_inputs_are_widened():
    weights = importance_weights(OLD.bfloat16(), ROLLOUT.bfloat16(), MASK, level="sequence", threshold=2)
    assert weights.dtype == torch.float32
