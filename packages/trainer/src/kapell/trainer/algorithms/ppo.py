"""The clipped surrogate of PPO, with separate bounds and the dual clip."""
# B rows, T response tokens

import torch
from torch import Tensor

from kapell.trainer.algorithms.masked import keep
from kapell.trainer.algorithms.policy_losses import TokenLosses, register_policy_loss

__all__ = ["clip_bounds", "limited_log_ratio", "ppo_clip"]

_MAX_LOG_RATIO = 20.0  # exp() overflows float32 at 88; beyond this the ratio is clipped anyway


@register_policy_loss("vanilla")
def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float | None = 3.0,
) -> TokenLosses:
    """max(-A r, -A clip(r, 1-low, 1+high)), and at most -A c where A < 0; r = exp(log p - log p_old).

    Schulman et al., 1707.06347, eq. 7; the upper bound of its own is DAPO's clip-higher (2503.14476, eq. 10); c is the
    dual clip (Ye et al., 1912.09729, eq. 5), off with None. `clip_ratio` sets both bounds that are not given.
    """
    low, high = clip_bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    if clip_ratio_c is not None and clip_ratio_c <= 1:
        raise ValueError(f"clip_ratio_c of the dual clip must exceed 1, got {clip_ratio_c}; None turns it off")
    advantages_BT = keep(response_mask, advantages)
    log_ratio_BT = limited_log_ratio(log_probs, old_log_probs, response_mask)
    ratio_BT = log_ratio_BT.exp()
    plain_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * ratio_BT.clamp(1 - low, 1 + high)
    losses_BT = torch.maximum(plain_BT, clipped_BT)
    metrics = {"pg_clipfrac": clipped_BT > plain_BT, "ppo_kl": -log_ratio_BT}
    if clip_ratio_c is not None:
        ceiling_BT = -advantages_BT * clip_ratio_c
        over_BT = (advantages_BT < 0) & (losses_BT > ceiling_BT)
        losses_BT = torch.where(over_BT, ceiling_BT, losses_BT)
        metrics["pg_clipfrac_lower"] = over_BT
    return TokenLosses(losses_BT, metrics)


def clip_bounds(clip_ratio: float, low: float | None, high: float | None) -> tuple[float, float]:
    """The lower and upper bound: `clip_ratio` where one is not given."""
    return clip_ratio if low is None else low, clip_ratio if high is None else high


def limited_log_ratio(log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """The log-ratio log p - log p_old in +-20, zero in masked slots, (B, T)."""
    log_ratio_BT = keep(response_mask, log_probs) - keep(response_mask, old_log_probs)
    return log_ratio_BT.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
