"""Estimators of KL(policy || reference) from the log-probabilities of sampled tokens.

With d = log p - log q (Schulman, "Approximating KL divergence", 2020):

    k1 = d    abs = |d|    k2 = d^2/2    k3 = exp(-d) + d - 1

k1 and k3 are unbiased in value. As a loss, only k2 has the gradient of the KL: k1's is zero on average, and k3's is
that of KL(q || p). A plus (`k1+`, `k3+`, `abs+`) takes the value of the one and the gradient of k2.
"""
# B rows, T response tokens

from enum import StrEnum

import torch
from torch import Tensor

from kapell.trainer.algorithms.aggregation import Aggregation, BatchTotals, LossResult, aggregated_loss
from kapell.trainer.algorithms.masked import as_mask, keep, masked_mean

__all__ = ["KLKind", "kl_estimate", "kl_loss", "kl_penalized_rewards"]

_MAX_LOG_RATIO = 20.0  # exp() overflows float32 at 88; a token this far off says nothing more precise
_MAX_K3 = 10.0  # one wild token must not carry the whole loss


class KLKind(StrEnum):
    """Which estimator."""

    K1 = "k1"
    ABS = "abs"
    K2 = "k2"
    K3 = "k3"
    K1_STRAIGHT_THROUGH = "k1+"
    ABS_STRAIGHT_THROUGH = "abs+"
    K3_STRAIGHT_THROUGH = "k3+"

    @classmethod
    def _missing_(cls, value: object) -> "KLKind | None":
        if isinstance(value, str):
            base = value.removesuffix("+")
            name = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(base, base)
            if name == "k2" or name != base:
                return cls(name if name == "k2" else name + value[len(base) :])
        raise ValueError(f"unknown KL estimator {value!r}; known: {', '.join(cls)} (also kl, mse, low_var_kl)")


def kl_estimate(log_probs_BT: Tensor, ref_log_probs_BT: Tensor, kind: KLKind | str) -> Tensor:
    """The estimate for each token, (B, T); d is limited to +-20 before exp and k3 to 10."""
    kind = KLKind(kind)
    log_ratio_BT = log_probs_BT - ref_log_probs_BT
    if not kind.endswith("+"):
        return _value(log_ratio_BT, kind)
    k2_BT = log_ratio_BT.square() / 2
    return k2_BT - k2_BT.detach() + _value(log_ratio_BT.detach(), KLKind(kind.removesuffix("+")))


def _value(log_ratio_BT: Tensor, kind: KLKind) -> Tensor:
    if kind is KLKind.K1:
        return log_ratio_BT
    if kind is KLKind.ABS:
        return log_ratio_BT.abs()
    if kind is KLKind.K2:
        return log_ratio_BT.square() / 2
    limited_BT = log_ratio_BT.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    # expm1 keeps the digits that exp(-d) + d - 1 loses near d = 0.
    return (torch.expm1(-limited_BT) + limited_BT).clamp(max=_MAX_K3)


def kl_loss(
    log_probs: Tensor,
    ref_log_prob: Tensor,
    loss_mask: Tensor,
    *,
    kind: KLKind | str,
    mode: Aggregation | str,
    totals: BatchTotals,
    scale: float | None = None,
) -> LossResult:
    """The aggregated estimate, to be added to the policy loss with a coefficient; metric `actor/kl_loss`."""
    estimate_BT = kl_estimate(keep(loss_mask, log_probs), keep(loss_mask, ref_log_prob), kind)
    return aggregated_loss("actor/kl_loss", estimate_BT, loss_mask, mode, totals, scale=scale)


def kl_penalized_rewards(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    *,
    beta: float,
    kind: KLKind | str = KLKind.K1,
) -> tuple[Tensor, float]:
    """Rewards r_t = score_t - beta kl_t on valid tokens, and the current KL = mean over rows of their token mean.

    (Ziegler et al., 1909.08593, sec. 2.2.) Rows without a valid token do not count in the current KL.
    """
    mask_BT = as_mask(response_mask)
    kl_BT = keep(mask_BT, kl_estimate(keep(mask_BT, old_log_probs), keep(mask_BT, ref_log_prob), kind))
    current = float(masked_mean(masked_mean(kl_BT, mask_BT, dim=-1), mask_BT.any(-1)))
    return token_level_scores - beta * kl_BT, current
