"""Correction for the gap between the policy that sampled and the one that is trained.

rho = exp(log p_old - log p_rollout). Weights are detached and multiply the token losses. Three policies are in play
when old log-probs are recomputed (decoupled); with bypass the sampler's stand in for them and rho is 1.
Sources: Yao et al., blog of Aug 2025 (truncated importance sampling, TIS); Liu, Li et al., blog of Sep 2025 (sequence
level, rejection); the IcePop blog of Sep 2025 (weights outside an interval are zero).
"""
# B rows, T response tokens

from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from kapell.trainer.algorithms.masked import as_mask, keep, masked_mean, masked_sum
from kapell.trainer.algorithms.metrics import Metric
from kapell.trainer.algorithms.mismatch import mismatch_metrics
from kapell.trainer.algorithms.rejection import rejection_mask
from kapell.trainer.algorithms.thresholds import parse_threshold

__all__ = ["Correction", "Level", "correct_rollout", "importance_weights"]

_MAX_LOG_RATIO = 20.0  # exp() overflows float32 at 88, its square at 44


class Level(StrEnum):
    """Of what the ratio is taken."""

    TOKEN = "token"
    """each token by itself: low variance, biased"""
    SEQUENCE = "sequence"
    """the product over the row, on each of its tokens: unbiased, high variance"""
    GEOMETRIC = "geometric"
    """the geometric mean over the row, on each of its tokens"""

    @classmethod
    def _missing_(cls, value: object) -> "Level":
        raise ValueError(f"unknown level of importance weights {value!r}; known: {', '.join(cls)}")


class Correction(NamedTuple):
    """What the update needs; columns by these names."""

    old_log_probs: Tensor
    """(B, T), the denominator of the ratio: recomputed, or the sampler's with bypass"""
    loss_mask: Tensor
    """(B, T) bool, the tokens that count in the loss; `response_mask` itself never changes"""
    rollout_is_weights: Tensor | None
    """(B, T), or None if no weights were asked for"""
    metrics: dict[str, Metric]
    """named `rollout_corr/...`"""


@torch.no_grad()
def correct_rollout(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    rollout_is: Level | str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
    bypass_mode: bool = False,
) -> Correction:
    """Weights, loss mask and metrics for a whole batch, (B, T) each.

    With `bypass_mode` nobody recomputed the old log-probs: pass the sampler's for both. Weights and rejection then have
    nothing to act on and asking for them is an error; the loss's own ratio corrects (`vanilla`, `reinforce`).
    """
    mask_BT = as_mask(response_mask)
    metrics = mismatch_metrics(old_log_probs, rollout_log_probs, mask_BT)
    if bypass_mode:
        if rollout_is is not None or rollout_rs is not None:
            raise ValueError(
                "with bypass_mode the old log-probs are the sampler's, so rollout_is and rollout_rs would see ratio 1; "
                "leave them out and correct in the loss (loss_mode vanilla or reinforce)"
            )
        return Correction(rollout_log_probs, mask_BT, None, metrics)
    weights_BT = None
    if rollout_is is not None:
        weights_BT = importance_weights(
            old_log_probs, rollout_log_probs, mask_BT, level=rollout_is, threshold=rollout_is_threshold
        )
        metrics |= _weight_metrics(weights_BT, mask_BT)
        if rollout_is_batch_normalize:
            weights_BT = _normalized(weights_BT, mask_BT, Level(rollout_is))
    loss_mask_BT = mask_BT
    if rollout_rs is not None:
        if rollout_rs_threshold is None:
            raise ValueError(f"rollout_rs={rollout_rs!r} needs a rollout_rs_threshold for each of its statistics")
        loss_mask_BT, rejection = rejection_mask(
            old_log_probs, rollout_log_probs, mask_BT, statistics=rollout_rs, thresholds=rollout_rs_threshold
        )
        metrics |= rejection
    return Correction(old_log_probs, loss_mask_BT, weights_BT, metrics)


@torch.no_grad()
def importance_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    level: Level | str,
    threshold: float | str,
) -> Tensor:
    """Weights (B, T), detached, zero in masked slots.

    `threshold` C truncates: min(rho, C) (TIS). "low_high" zeroes what is outside (IcePop).
    """
    log_rho_BT = keep(response_mask, old_log_probs) - keep(response_mask, rollout_log_probs)
    level = Level(level)
    if level is Level.SEQUENCE:
        log_rho_BT = masked_sum(log_rho_BT, response_mask, dim=-1)[:, None].expand_as(log_rho_BT)
    elif level is Level.GEOMETRIC:
        log_rho_BT = masked_mean(log_rho_BT, response_mask, dim=-1)[:, None].expand_as(log_rho_BT)
    rho_BT = log_rho_BT.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    low, high = parse_threshold(threshold)
    if low is None:
        return keep(response_mask, rho_BT.clamp(max=high))
    return keep(as_mask(response_mask) & (rho_BT >= low) & (rho_BT <= high), rho_BT)


def _normalized(weights_BT: Tensor, mask_BT: Tensor, level: Level) -> Tensor:
    if level is Level.TOKEN:
        mean = masked_mean(weights_BT, mask_BT)
    else:
        mean = masked_mean(masked_mean(weights_BT, mask_BT, dim=-1), mask_BT.any(-1))
    return weights_BT / mean if mean > 0 else weights_BT


def _weight_metrics(weights_BT: Tensor, mask_BT: Tensor) -> dict[str, Metric]:
    count = int(mask_BT.sum())
    if not count:
        return {}
    mean = float(masked_mean(weights_BT, mask_BT))
    mean_square = float(masked_mean(weights_BT.square(), mask_BT))
    valid = weights_BT[mask_BT]
    return {
        "rollout_corr/rollout_is_mean": Metric.mean(mean, weight=count),
        "rollout_corr/rollout_is_max": Metric.max(float(valid.max())),
        "rollout_corr/rollout_is_min": Metric.min(float(valid.min())),
        # (sum w)^2 / (n sum w^2) of this batch; it does not decompose over parts, so compute it on the whole one.
        "rollout_corr/rollout_is_eff_sample_size": Metric.mean(
            mean**2 / mean_square if mean_square else 0.0, weight=count
        ),
    }
