"""Worked numbers of policy, value and entropy losses and of their aggregation: value and gradient."""

import math

import pytest
import torch

from kapell.trainer.algorithms import (
    Aggregation,
    BatchTotals,
    TokenLosses,
    aggregate,
    aggregated_loss,
    entropy_from_logits,
    entropy_loss,
    log_probs_from_logits,
    mask_from_lengths,
    policy_loss,
    policy_losses,
    value_loss,
)

ONE_OF_EACH = {"dro_beta": 0.1}


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, tensor(expected), atol=1e-6, rtol=0)


def run(name, log_probs, old, advantages, mask, mode="token-mean", options=None, **columns):
    """Loss, gradient by log_probs, and metric values."""
    leaf = log_probs.clone().requires_grad_()
    batch = {"log_probs": leaf, "old_log_probs": old, "advantages": advantages, "response_mask": mask} | columns
    totals = BatchTotals.of(columns.get("loss_mask", mask))
    result = policy_loss(name, batch, ONE_OF_EACH | (options or {}), mode=mode, totals=totals)
    result.loss.backward()
    return result.loss.detach(), leaf.grad, {key: metric.value for key, metric in result.metrics.items()}


RATIOS = tensor([[0.5, 0.9, 1.1, 1.5, 4]])


@pytest.mark.parametrize(
    ("advantage", "options", "loss", "gradient", "clipfrac", "lower"),
    [
        (1, {}, -0.98, [-0.5, -0.9, -1.1, 0, 0], 0.4, 0),
        (1, {"clip_ratio_high": 0.28}, -1.012, [-0.5, -0.9, -1.1, 0, 0], 0.4, 0),
        (-1, {}, 1.46, [0, 0.9, 1.1, 1.5, 0], 0.2, 0.2),
        (-1, {"clip_ratio_c": None}, 1.66, [0, 0.9, 1.1, 1.5, 4], 0.2, None),
    ],
)
def test_clipped_loss_matches_the_worked_numbers(advantage, options, loss, gradient, clipfrac, lower):
    ones = torch.ones(1, 5, dtype=torch.float64)
    value, grad, metrics = run("vanilla", RATIOS.log(), 0 * ones, advantage * ones, ones, options=options)
    close(value, loss)
    close(grad, [[g / 5 for g in gradient]])
    assert metrics["actor/pg_clipfrac"] == pytest.approx(clipfrac)
    assert metrics.get("actor/pg_clipfrac_lower") == lower
    assert metrics["actor/ppo_kl"] == pytest.approx(-0.217712, abs=1e-6)
    assert metrics["actor/pg_loss"] == pytest.approx(loss)


def test_clip_ratio_alone_sets_both_bounds():
    ones = torch.ones(1, 5, dtype=torch.float64)
    for advantage in (1, -1):
        alone = run("vanilla", RATIOS.log(), 0 * ones, advantage * ones, ones, options={"clip_ratio": 0.3})
        both = run(
            "vanilla",
            RATIOS.log(),
            0 * ones,
            advantage * ones,
            ones,
            options={"clip_ratio_low": 0.3, "clip_ratio_high": 0.3},
        )
        assert torch.equal(alone[1], both[1])


def test_dual_clip_must_exceed_one():
    ones = torch.ones(1, 5)
    with pytest.raises(ValueError, match="must exceed 1, got 1"):
        run("vanilla", ones, ones, ones, ones, options={"clip_ratio_c": 1.0})


LOGP = tensor([[-1, -1.2, -0.7], [-0.5, -0.9, 0]])
OLD = tensor([[-1.1, -1, -1], [-0.6, -0.4, 0]])
ADVANTAGES = tensor([[1, 1, 1], [-1, -1, -1]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
RHO = (LOGP - OLD).exp()
S = (0.178157, 0.204683)

SEQ = "seq-mean-token-mean"
# Gradients by hand, token-mean over 5: -A r/5 where not clipped (vanilla); -A clip(r)/5 (cispo); -A/5 (gpg);
# (-A + beta log r)/5 (dro); gspo -A s/n/2.
GOLDEN = [
    ("gspo", SEQ, {}, -0.125104, [[-S[0]] * 3, [S[1], S[1], 0]]),
    ("gspo", SEQ, {"clip_ratio": 0.05}, -0.05, [[0, 0, 0], [0, 0, 0]]),
    ("vanilla", "token-mean", {}, -0.243746, [[-0.221034, -0.163746, 0], [0.221034, 0, 0]]),
    ("vanilla", SEQ, {}, -0.044358, [[-0.184195, -0.136455, 0], [0.276293, 0, 0]]),
    ("cispo", "token-mean", {}, 0.331012, [[-0.221034, -0.163746, -0.24], [0.221034, 0.16, 0]]),
    ("gpg", "token-mean", {}, 0.3, [[-0.2, -0.2, -0.2], [0.2, 0.2, 0]]),
    ("reinforce", "token-mean", {}, 0.3, [[-0.2, -0.2, -0.2], [0.2, 0.2, 0]]),
    ("sapo", SEQ, {}, -0.163450, None),
    ("geo_mean", SEQ, {}, -0.041333, [[-0.172316, -0.172316, 0], [0.237807, 0, 0]]),
    ("dro", "token-mean", {}, 0.304, [[-0.198, -0.204, -0.194], [0.202, 0.19, 0]]),
    ("dppo_tv", "token-mean", {}, 0.495993, [[-0.221034, -0.163746, -0.269972], [0.221034, 0, 0]]),
]


@pytest.mark.parametrize(("name", "mode", "options", "loss", "gradient"), GOLDEN)
def test_policy_losses_match_the_worked_numbers(name, mode, options, loss, gradient):
    value, grad, metrics = run(name, LOGP, OLD, ADVANTAGES, MASK, mode, options)
    close(value, loss)
    assert metrics["actor/pg_loss"] == pytest.approx(loss, abs=1e-6)
    if gradient is not None:
        close(grad, gradient)


def test_gradients_of_the_soft_gate_follow_its_derivative():
    """d/dlogp of -A 4/tau sigmoid(tau (r-1)) is -4 A r s (1-s)."""
    _, grad, _ = run("sapo", LOGP, OLD, ADVANTAGES, MASK, SEQ)
    for row, tau, size in ((0, 1.0, 3), (1, 1.05, 2)):
        gate = torch.sigmoid(tau * (RHO[row] - 1))
        expected = -4 * ADVANTAGES[row] * RHO[row] * gate * (1 - gate) / size / 2
        torch.testing.assert_close(grad[row], expected * MASK[row])


def test_every_registered_loss_has_worked_numbers():
    assert {case[0] for case in GOLDEN} == set(policy_losses)


def test_trust_region_of_total_variation_leaves_out_tokens():
    _, _, metrics = run("dppo_tv", LOGP, OLD, ADVANTAGES, MASK)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(1 / 5)  # mask [[1, 1, 1], [1, 0, _]]


def test_reinforce_in_bypass_weighs_by_the_truncated_ratio_without_gradient():
    value, grad, _ = run("reinforce", LOGP, OLD, ADVANTAGES, MASK, options={"rollout_is": "token"})
    weights = RHO.clamp(max=2.0) * MASK
    close(value, float((-weights * ADVANTAGES * LOGP).sum() / 5))
    torch.testing.assert_close(grad, -weights * ADVANTAGES / 5)


@pytest.mark.parametrize("name", sorted(policy_losses))
def test_importance_weights_multiply_token_losses_without_gradient(name):
    numbers = [[0.5, 2, 1], [1.5, 0, 7]]
    weights = tensor(numbers).requires_grad_()
    value, grad, _ = run(name, LOGP, OLD, ADVANTAGES, MASK, "token-sum", rollout_is_weights=weights)
    total = 0.0
    for row in range(2):
        for token in range(3):
            only = torch.zeros_like(MASK)
            only[row, token] = 1
            total += float(run(name, LOGP, OLD, ADVANTAGES, MASK, "token-sum", loss_mask=only)[0] * numbers[row][token])
    assert float(value) == pytest.approx(total)
    assert weights.grad is None
    assert grad.isfinite().all()


@pytest.mark.parametrize("name", sorted(policy_losses))
def test_first_mini_batch_of_an_on_policy_step_has_ratio_one(name):
    _, grad, metrics = run(name, LOGP, LOGP, ADVANTAGES, MASK)
    for key in ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
        assert metrics.get(key, 0.0) == 0.0
    if name not in ("gspo", "geo_mean"):  # all others have the policy gradient -A/N there
        torch.testing.assert_close(grad, -ADVANTAGES * MASK / 5)


def test_rejected_tokens_leave_the_loss_but_stay_in_the_sequence_ratio():
    loss_mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    value, grad, _ = run("gspo", LOGP, OLD, ADVANTAGES, MASK, "token-sum", loss_mask=loss_mask)
    s = ((LOGP - OLD) * MASK).sum(-1) / MASK.sum(-1)
    close(value, float(-2 * s[0].exp() + 2 * s[1].exp()))
    assert grad[0, 1] == 0


def test_loss_mask_cannot_add_tokens_to_the_response():
    value, _, _ = run("gpg", LOGP, OLD, ADVANTAGES, MASK, "token-sum", loss_mask=torch.ones(2, 3))
    plain, _, _ = run("gpg", LOGP, OLD, ADVANTAGES, MASK, "token-sum")
    assert value == plain


@pytest.mark.parametrize("name", sorted(policy_losses))
@pytest.mark.parametrize("shift", [100.0, -100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_ratios_of_a_hundred_stay_finite(name, shift, dtype):
    old = (OLD - 200).to(dtype)
    value, grad, metrics = run(name, old + shift, old, ADVANTAGES.to(dtype), MASK)
    assert value.isfinite()
    assert grad.isfinite().all()
    assert all(math.isfinite(number) for number in metrics.values())


@pytest.mark.parametrize("name", sorted(policy_losses))
def test_half_precision_is_computed_in_single(name):
    half = [column.bfloat16() for column in (LOGP, OLD, ADVANTAGES)]
    value, grad, _ = run(name, *half, MASK)
    exact, _, _ = run(name, *(column.double() for column in half), MASK)
    assert value.dtype == torch.float32
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(value.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(policy_losses))
@pytest.mark.parametrize("mode", Aggregation)
def test_an_empty_mask_gives_loss_zero_with_zero_gradient(name, mode):
    value, grad, metrics = run(name, LOGP, OLD, ADVANTAGES, torch.zeros(2, 3), mode)
    assert value == 0
    assert not grad.any()
    assert all(math.isnan(number) for number in metrics.values())


def test_value_loss_clips_around_the_old_value():
    predictions = tensor([[0.9, 0.2, 0.55, 2]]).requires_grad_()
    values, returns = tensor([[0.5] * 4]), tensor([[1, 1, 0.5, 1]])
    mask = torch.ones(1, 4)
    result = value_loss(
        predictions, values, returns, mask, cliprange_value=0.2, mode="token-mean", totals=BatchTotals.of(mask)
    )
    result.loss.backward()
    close(result.loss.detach(), 0.2165625)
    # .9 is clipped to .7, which is worse: no gradient. The rest: (v - R)/4.
    close(predictions.grad, [[0, -0.2, 0.0125, 0.25]])
    assert result.metrics["critic/vf_clipfrac"].value == 0.25
    assert result.metrics["critic/vf_loss"].value == pytest.approx(0.2165625)


def test_value_loss_is_half_the_squared_error():
    result = value_loss(
        tensor([[3]]),
        tensor([[0]]),
        tensor([[1]]),
        torch.ones(1, 1),
        cliprange_value=None,
        mode="token-mean",
        totals=BatchTotals(num_tokens=1, num_sequences=1),
    )
    assert result.loss == 2


LOSSES = tensor([[1, 2, 3, 9], [4, 9, 9, 9], [5, 6, 9, 9], [9, 9, 9, 9]])
LOSS_MASK = mask_from_lengths(torch.tensor([3, 1, 2, 0]), 4)
AGGREGATED = {
    "token-mean": 3.5,
    "token-sum": 21,
    "seq-mean-token-sum": 7,
    "seq-mean-token-mean": 3.833333,
    "seq-mean-token-sum-norm": 1.75,
}


@pytest.mark.parametrize("mode", Aggregation)
def test_aggregation_matches_the_worked_numbers(mode):
    close(aggregate(LOSSES, LOSS_MASK, mode, BatchTotals.of(LOSS_MASK)), AGGREGATED[mode])


def test_the_constant_of_the_normalised_sum_can_be_given():
    close(aggregate(LOSSES, LOSS_MASK, "seq-mean-token-sum-norm", BatchTotals.of(LOSS_MASK), scale=10), 0.7)


def test_counting_masked_rows_changes_the_sequence_mean():
    close(aggregate(LOSSES, LOSS_MASK, "seq-mean-token-sum", BatchTotals(num_tokens=6, num_sequences=4)), 5.25)


def test_gradient_of_each_aggregation():
    expected = {
        "token-mean": [[1 / 6] * 3, [1 / 6], [1 / 6] * 2],
        "token-sum": [[1] * 3, [1], [1] * 2],
        "seq-mean-token-sum": [[1 / 3] * 3, [1 / 3], [1 / 3] * 2],
        "seq-mean-token-mean": [[1 / 9] * 3, [1 / 3], [1 / 6] * 2],
        "seq-mean-token-sum-norm": [[1 / 12] * 3, [1 / 12], [1 / 12] * 2],
    }
    for mode in Aggregation:
        losses = LOSSES.clone().requires_grad_()
        aggregate(losses, LOSS_MASK, mode, BatchTotals.of(LOSS_MASK)).backward()
        assert losses.grad[3].tolist() == [0] * 4
        for row, gradients in enumerate(expected[mode]):
            close(losses.grad[row, : len(gradients)], gradients)


def test_short_micro_batches_do_not_weigh_more():
    first, second = tensor([[1, 0, 0]]), tensor([[0, 0, 0]])
    masks = torch.tensor([[1, 0, 0]]), torch.tensor([[1, 1, 1]])
    totals = BatchTotals.combined([BatchTotals.of(mask) for mask in masks], dp_size=1)
    parts = [aggregate(x, mask, "token-mean", totals) for x, mask in zip((first, second), masks, strict=True)]
    assert sum(parts) == 0.25


def test_modes_compute_what_their_names_say():
    losses, mask = tensor([[1, 1, 0], [2, 0, 0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    for mode, expected in (("token-mean", 4 / 3), ("seq-mean-token-sum", 2.0), ("seq-mean-token-mean", 1.5)):
        close(aggregate(losses, mask, mode, BatchTotals.of(mask)), expected)


@pytest.mark.parametrize(
    "mode", sorted(set(Aggregation) - {"token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm"})
)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("micros", [1, 2, 4])
def test_logged_loss_does_not_depend_on_the_split(mode, ranks, micros):
    losses = torch.full((8, 3), 2.0)
    mask = torch.ones(8, 3)
    totals = BatchTotals(num_tokens=24, num_sequences=8, dp_size=ranks)
    rows = 8 // ranks // micros
    metric = None
    for start in range(0, 8, rows):
        part = slice(start, start + rows)
        more = aggregated_loss("loss", losses[part], mask[part], mode, totals).metrics["loss"]
        metric = more if metric is None else metric + more
    assert metric.value == pytest.approx(2.0)


def test_several_mini_batches_average_in_the_log():
    mask = torch.ones(1, 1)
    totals = BatchTotals.of(mask)
    metrics = [aggregated_loss("loss", tensor([[x]]), mask, "token-sum", totals).metrics["loss"] for x in (1, 3)]
    assert (metrics[0] + metrics[1]).value == 2


def test_unknown_aggregation_lists_the_known():
    with pytest.raises(ValueError, match="unknown loss aggregation 'mean'; known: token-mean, token-sum"):
        aggregate(LOSSES, LOSS_MASK, "mean", BatchTotals.of(LOSS_MASK))


LOGITS = tensor([[[2, 1, 0, -1]]])


@pytest.mark.parametrize(
    ("temperature", "log_probs", "entropy"),
    [
        (1.0, [-0.44019, -1.44019, -2.44019, -3.44019], 0.947537),
        (0.5, [-0.145078, -2.145078, -4.145078, -6.145078], 0.455429),
    ],
)
def test_log_probs_and_entropy_at_a_temperature_match_the_worked_numbers(temperature, log_probs, entropy):
    for token, expected in enumerate(log_probs):
        got = log_probs_from_logits(LOGITS, torch.tensor([[token]]), temperature=temperature)
        close(got, [[expected]])
    close(entropy_from_logits(LOGITS, temperature=temperature), [[entropy]])


def test_gradient_of_a_log_prob_is_one_hot_minus_softmax():
    logits = LOGITS.clone().requires_grad_()
    log_probs_from_logits(logits, torch.tensor([[1]]), temperature=0.5).sum().backward()
    expected = (torch.tensor([0, 1, 0, 0]) - torch.softmax(LOGITS[0, 0] / 0.5, -1)) / 0.5
    torch.testing.assert_close(logits.grad[0, 0], expected)


def test_entropy_with_ruled_out_tokens_is_finite_with_its_gradient():
    logits = tensor([[[1, 0, -math.inf]]]).requires_grad_()
    entropy = entropy_from_logits(logits)
    entropy.sum().backward()
    torch.testing.assert_close(entropy.detach(), entropy_from_logits(tensor([[[1, 0]]])))
    assert logits.grad.isfinite().all()


def test_temperature_zero_is_refused():
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        log_probs_from_logits(LOGITS, torch.tensor([[1]]), temperature=0.0)


def test_entropy_loss_is_aggregated():
    result = entropy_loss(LOSSES, LOSS_MASK, mode="token-mean", totals=BatchTotals.of(LOSS_MASK))
    assert result.loss == 3.5
    assert result.metrics["actor/entropy"].value == 3.5


def test_a_loss_of_your_own_gets_only_what_it_names():
    def squared(log_probs, my_column, loss_mask=None, *, power):
        assert loss_mask is not None
        return TokenLosses(my_column * log_probs**power, {"seen": my_column})

    value, grad, metrics = run(
        squared, LOGP, OLD, ADVANTAGES, MASK, my_column=2 * torch.ones(2, 3), options={"power": 2}
    )
    close(value, float((2 * LOGP.square() * MASK).sum() / 5))
    torch.testing.assert_close(grad, 4 * LOGP * MASK / 5)
    assert metrics["actor/seen"] == 2


def test_gradient_of_the_entropy_is_minus_p_times_log_p_plus_h():
    logits = LOGITS.clone().requires_grad_()
    entropy_from_logits(logits).sum().backward()
    log_p = torch.log_softmax(LOGITS, -1)
    torch.testing.assert_close(logits.grad, -log_p.exp() * (log_p + 0.947537), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", sorted(policy_losses))
def test_a_micro_batch_without_rows_still_has_a_backward_pass(name):
    log_probs = torch.zeros(0, 3, requires_grad=True)
    empty = torch.zeros(0, 3)
    columns = {"log_probs": log_probs, "old_log_probs": empty, "advantages": empty, "response_mask": empty}
    totals = BatchTotals(num_tokens=7, num_sequences=2)
    loss, metrics = policy_loss(name, columns, ONE_OF_EACH, mode="token-mean", totals=totals)
    loss.backward()
    assert loss == 0
    assert not any(metric.weight for metric in metrics.values())
