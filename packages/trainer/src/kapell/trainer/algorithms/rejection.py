"""Rejection of tokens or sequences on which the training policy is too far from the sampler's.

A statistic is `token_`, `seq_sum_`, `seq_mean_` or `seq_max_` of k1 = -log rho, k2 = k1^2/2 or k3 = rho - 1 - log rho,
with rho = p_old/p_rollout (Liu, Li et al., Sep 2025; masked importance sampling).
"""
# B rows, T response tokens

import math

import torch
from torch import Tensor

from kapell.trainer.algorithms.masked import as_mask, keep, masked_mean, masked_sum
from kapell.trainer.algorithms.metrics import Metric
from kapell.trainer.algorithms.thresholds import parse_threshold

__all__ = ["REJECTION_STATISTICS", "rejection_mask", "rejection_statistic"]

_MAX_LOG_RATIO = 20.0  # exp() overflows float32 at 88

REJECTION_STATISTICS = tuple(
    f"{scope}_{kind}"
    for scope in ("token", "seq_sum", "seq_mean", "seq_max")
    for kind in ("k1", "k2", "k3")
    if (scope, kind) != ("seq_max", "k1")
)
"""The names; a maximum of the signed k1 would see one side only and is left out."""


@torch.no_grad()
def rejection_mask(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    statistics: str,
    thresholds: float | str,
) -> tuple[Tensor, dict[str, Metric]]:
    """The loss mask (B, T) bool: valid tokens that pass every statistic; and `rollout_corr/rollout_rs_...` metrics.

    Both arguments list by commas, e.g. "token_k1,seq_mean_k3" with "0.5_2,0.01". k2 and k3 have an upper bound. k1 has
    "low_high" (or one number h for 1/h to h) that bounds exp(k1) = rollout/train: "0.5_1.2" keeps rho in [1/1.2, 2].
    """
    mask_BT = as_mask(response_mask)
    names = [name.strip() for name in statistics.split(",")]
    limits = [limit.strip() for limit in str(thresholds).split(",")]
    if len(limits) == 1:
        limits = limits * len(names)
    if len(limits) != len(names):
        raise ValueError(f"{len(names)} statistics ({statistics}) but {len(limits)} thresholds ({thresholds})")
    kept_BT = mask_BT
    metrics = {}
    for name, limit in zip(names, limits, strict=True):
        low, high = _bounds(name, limit)
        value_BT = rejection_statistic(old_log_probs, rollout_log_probs, mask_BT, name)
        passed_BT = (value_BT >= low) & (value_BT <= high)
        metrics |= _fractions(f"rollout_corr/rollout_rs_{name}", passed_BT, mask_BT)
        kept_BT = kept_BT & passed_BT
    return kept_BT, metrics | _fractions("rollout_corr/rollout_rs", kept_BT, mask_BT)


def rejection_statistic(old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, name: str) -> Tensor:
    """One statistic on each token of the row it belongs to, (B, T), zero in masked slots."""
    if name not in REJECTION_STATISTICS:
        raise ValueError(f"unknown rejection statistic {name!r}; known: {', '.join(REJECTION_STATISTICS)}")
    scope, kind = name.rsplit("_", 1)
    log_rho_BT = keep(response_mask, old_log_probs) - keep(response_mask, rollout_log_probs)
    log_rho_BT = log_rho_BT.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    if kind == "k1":
        value_BT = -log_rho_BT
    elif kind == "k2":
        value_BT = log_rho_BT.square() / 2
    else:
        value_BT = torch.expm1(log_rho_BT) - log_rho_BT
    if scope == "token":
        return value_BT
    if scope == "seq_max":  # k2 and k3 are never negative, and masked slots are zero
        value_B = value_BT.amax(-1)
    else:
        value_B = (masked_sum if scope == "seq_sum" else masked_mean)(value_BT, response_mask, -1)
    return keep(response_mask, value_B[:, None].expand_as(value_BT))


def _bounds(name: str, limit: str) -> tuple[float, float]:
    low, high = parse_threshold(limit)
    if name.endswith("k1"):
        return math.log(1 / high if low is None else low), math.log(high)
    if low is not None:
        raise ValueError(f"{name} is never negative and has an upper bound only, got {limit!r}")
    return -math.inf, high


def _fractions(prefix: str, passed_BT: Tensor, mask_BT: Tensor) -> dict[str, Metric]:
    rejected_BT = mask_BT & ~passed_BT
    tokens, rows = int(mask_BT.sum()), int(mask_BT.any(-1).sum())
    return {
        f"{prefix}_masked_fraction": Metric.part_of_mean(int(rejected_BT.sum()), weight=tokens),
        f"{prefix}_seq_masked_fraction": Metric.part_of_mean(int(rejected_BT.any(-1).sum()), weight=rows),
    }
