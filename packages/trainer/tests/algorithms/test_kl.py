"""KL estimators, KL in the reward, KL controllers: worked numbers and identities."""

import math

import pytest
import torch

from kapell.trainer.algorithms import (
    AdaptiveKLController,
    BatchTotals,
    FixedKLController,
    KLKind,
    kl_estimate,
    kl_loss,
    kl_penalized_rewards,
)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, tensor(expected), atol=1e-6, rtol=0)


LOGP, REF = tensor([-1, -2, -0.1]), tensor([-1.5, -1.2, -0.1])
K1, K2, K3 = [0.5, -0.8, 0], [0.125, 0.32, 0], [0.106531, 0.425541, 0]
GOLDEN = {
    "k1": (K1, [1, 1, 1]),
    "abs": ([0.5, 0.8, 0], [1, -1, 0]),
    "k2": (K2, [0.5, -0.8, 0]),
    "k3": (K3, [0.393469, -1.225541, 0]),
    "k1+": (K1, [0.5, -0.8, 0]),
    "abs+": ([0.5, 0.8, 0], [0.5, -0.8, 0]),
    "k3+": (K3, [0.5, -0.8, 0]),
}


@pytest.mark.parametrize("kind", KLKind)
def test_estimators_match_the_worked_numbers(kind):
    log_probs = LOGP.clone().requires_grad_()
    estimate = kl_estimate(log_probs, REF, kind)
    estimate.sum().backward()
    value, gradient = GOLDEN[kind]
    close(estimate.detach(), value)
    close(log_probs.grad, gradient)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"), ("low_var_kl+", "k3+"), ("kl+", "k1+"), ("k2+", "k2")],
)
def test_names_that_verl_uses_are_understood(name, kind):
    assert KLKind(name) is KLKind(kind)


@pytest.mark.parametrize("name", ["k4", "k3++", "", None])
def test_unknown_names_list_the_known(name):
    with pytest.raises(ValueError, match="known: k1, abs, k2, k3"):
        kl_estimate(LOGP, REF, name)


P, Q = tensor([0.5, 0.3, 0.2]), tensor([0.4, 0.4, 0.2])


def test_values_over_a_known_distribution():
    def expected(kind):
        return (P * kl_estimate(P.log(), Q.log(), kind)).sum()

    def spread(kind):
        estimate = kl_estimate(P.log(), Q.log(), kind)
        return (P * (estimate - expected(kind)).square()).sum().sqrt()

    close(expected("k1"), 0.02526715)
    close(expected("k3"), 0.02526715)
    close(expected("k2"), 0.02486241)
    close(spread("k1"), 0.221554)
    close(spread("k3"), 0.015956)


@pytest.mark.parametrize(
    ("kind", "gradient"),
    [
        ("k1", [0, 0, 0]),
        ("k2", [0.098938, -0.093885, -0.005053]),
        ("k1+", [0.098938, -0.093885, -0.005053]),
        ("k3+", [0.098938, -0.093885, -0.005053]),
        ("k3", [0.1, -0.1, 0]),
    ],
)
def test_expected_gradients_by_the_logits(kind, gradient):
    """Samples come from p, but the gradient does not flow through the sampling, as in training."""
    logits = P.log().requires_grad_()
    (P * kl_estimate(torch.log_softmax(logits, -1), Q.log(), kind)).sum().backward()
    close(logits.grad, gradient)


def test_true_gradient_is_that_of_k2():
    logits = P.log().requires_grad_()
    log_p = torch.log_softmax(logits, -1)
    (log_p.exp() * (log_p - Q.log())).sum().backward()
    close(logits.grad, [0.098938, -0.093885, -0.005053])


@pytest.mark.parametrize("kind", KLKind)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gap", [0.0, 100.0, -100.0, 200.0, -200.0])
def test_big_log_ratios_have_a_finite_value_and_gradient(kind, dtype, gap):
    log_probs = torch.tensor([0.0, -gap], dtype=dtype, requires_grad=True)
    estimate = kl_estimate(log_probs, torch.zeros(2, dtype=dtype), kind)
    estimate.sum().backward()
    assert estimate.isfinite().all()
    assert log_probs.grad.isfinite().all()
    assert estimate[0] == 0
    if KLKind(kind).removesuffix("+") == "k3":
        assert (estimate <= 10).all()
        assert (estimate >= 0).all()


def test_infinite_log_probs_under_the_mask_do_not_count():
    log_probs = tensor([[-1, -math.inf]]).requires_grad_()
    mask = torch.tensor([[1, 0]])
    result = kl_loss(
        log_probs, tensor([[-1.5, math.inf]]), mask, kind="k3", mode="token-mean", totals=BatchTotals.of(mask)
    )
    result.loss.backward()
    close(result.loss.detach(), 0.106531)
    close(log_probs.grad, [[0.393469, 0]])
    assert result.metrics["actor/kl_loss"].value == pytest.approx(0.106531, abs=1e-6)


SCORES = tensor([[0, 0, 1], [0, 0.5, 0]])
OLD = tensor([[-1, -1, -1], [-2, -1, math.nan]])
REFERENCE = tensor([[-1.2, -0.9, -1], [-2, -1.5, math.inf]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def test_kl_in_the_reward_matches_the_worked_numbers():
    rewards, current = kl_penalized_rewards(SCORES, OLD, REFERENCE, MASK, beta=0.1, kind="k1")
    close(rewards, [[-0.02, 0.01, 1], [0, 0.45, 0]])
    assert current == pytest.approx(0.141667, abs=1e-6)


def test_rows_without_tokens_do_not_dilute_the_current_kl():
    empty = torch.zeros(1, 3)
    _, current = kl_penalized_rewards(
        torch.cat([SCORES, empty]),
        torch.cat([OLD, empty]),
        torch.cat([REFERENCE, empty]),
        torch.cat([MASK, empty]),
        beta=0.1,
    )
    assert current == pytest.approx(0.141667, abs=1e-6)


def test_adaptive_controller_follows_the_worked_numbers():
    controller = AdaptiveKLController(beta=0.2, target=0.1, horizon=10000)
    for current, beta in ((0.05, 0.198976), (0.11, 0.19948538), (1.0, 0.20050674)):
        controller.update(current=current, num_rows=256)
        assert controller.beta == pytest.approx(beta, abs=1e-8)


def test_fixed_controller_stays():
    controller = FixedKLController(beta=0.0)
    controller.update(current=5.0, num_rows=256)
    assert controller.beta == 0.0


def test_adaptive_controller_needs_a_target():
    with pytest.raises(ValueError, match="must be positive, got 0"):
        AdaptiveKLController(beta=0.2, target=0, horizon=1)


def test_one_step_of_grpo_from_end_to_end():
    from kapell.trainer.algorithms import compute_advantages, policy_loss

    old, new, ref = (
        tensor(rows).log()
        for rows in (
            [[0.5, 0.25], [0.5, 0.5], [0.2, 0.4], [0.1, 1]],
            [[0.55, 0.25], [0.35, 0.45], [0.25, 0.6], [0.1, 1]],
            [[0.5, 0.25], [0.5, 0.5], [0.25, 0.5], [0.1, 1]],
        )
    )
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]])
    columns = {
        "token_level_rewards": tensor([[0, 1], [0, 0], [0, 1], [0, 0]]),
        "response_mask": mask,
        "uid": ["x", "x", "y", "y"],
        "log_probs": new,
        "old_log_probs": old,
    }
    totals = BatchTotals.of(mask)
    columns["advantages"] = compute_advantages("grpo", columns).advantages
    close(columns["advantages"][:, 0], [0.707106, -0.707106, 0.707106, -0.707106])
    policy = policy_loss("vanilla", columns, mode="token-mean", totals=totals)
    penalty = kl_loss(new, ref, mask, kind="k3", mode="token-mean", totals=totals)
    close(policy.loss, -0.181827)
    close(penalty.loss, 0.013958)
    close(policy.loss + 0.04 * penalty.loss, -0.181269)
    assert policy.metrics["actor/pg_clipfrac"].value == pytest.approx(3 / 7)
    columns["advantages"] = compute_advantages("dr_grpo", columns).advantages
    dr_grpo = policy_loss("vanilla", columns, mode="seq-mean-token-sum-norm", totals=totals)
    close(dr_grpo.loss, -0.1125)
