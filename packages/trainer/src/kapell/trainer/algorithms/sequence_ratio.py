"""Policy losses whose ratio is that of a whole sequence."""
# B rows, T response tokens

import torch
from torch import Tensor

from kapell.trainer.algorithms.masked import as_mask, keep, masked_mean
from kapell.trainer.algorithms.policy_losses import TokenLosses, register_policy_loss
from kapell.trainer.algorithms.ppo import clip_bounds, limited_log_ratio

__all__ = ["gmpo", "gspo"]

_MAX_LOG_SEQUENCE_RATIO = 10.0  # a mean over tokens; e^10 is far outside any clip range and still exact in float32


@register_policy_loss("gspo")
def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> TokenLosses:
    """max(-A s, -A clip(s, 1-low, 1+high)) with s = exp(mean over tokens of log p/p_old) (Zheng et al., 2507.18071).

    Eq. 5 and 7, in the token form of eq. 14: each token has the value of s and its own gradient, A s grad log p. The
    paper's bounds are 3e-4 and 4e-4; it aggregates by `seq-mean-token-mean`.
    """
    low, high = clip_bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    advantages_BT = keep(response_mask, advantages)
    log_probs_BT = keep(response_mask, log_probs)
    log_ratio_BT = log_probs_BT - keep(response_mask, old_log_probs)
    log_s_B1 = masked_mean(log_ratio_BT, response_mask, dim=-1)[:, None].clamp(max=_MAX_LOG_SEQUENCE_RATIO)
    s_BT = torch.exp(log_s_B1.detach() + log_probs_BT - log_probs_BT.detach())
    plain_BT = -advantages_BT * s_BT
    clipped_BT = -advantages_BT * s_BT.clamp(1 - low, 1 + high)
    return TokenLosses(
        torch.maximum(plain_BT, clipped_BT), {"pg_clipfrac": clipped_BT > plain_BT, "ppo_kl": -log_ratio_BT}
    )


@register_policy_loss("geo_mean")
def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> TokenLosses:
    """-A times the geometric mean of the clipped token ratios (GMPO, Zhao et al., 2507.20673).

    Each log-ratio is clipped to [-low, high] on the side that A's sign makes harmful; A is the mean of the row. All
    tokens of a row have the row's loss: `seq-mean-token-mean`, as in the paper, is then the mean over rows.
    """
    low, high = clip_bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    advantages_BT = keep(response_mask, advantages)
    log_ratio_BT = limited_log_ratio(log_probs, old_log_probs, response_mask)
    clipped_BT = log_ratio_BT.clamp(-low, high)
    pessimistic_BT = torch.where(
        advantages_BT > 0, torch.minimum(log_ratio_BT, clipped_BT), torch.maximum(log_ratio_BT, clipped_BT)
    )
    ratio_B = masked_mean(pessimistic_BT, response_mask, dim=-1).exp()
    losses_B = -masked_mean(advantages_BT, response_mask, dim=-1) * ratio_B
    outside_BT = as_mask(response_mask) & (log_ratio_BT != clipped_BT)
    metrics = {
        "pg_clipfrac": outside_BT & (advantages_BT > 0),
        "pg_clipfrac_lower": outside_BT & (advantages_BT < 0),
        "ppo_kl": -log_ratio_BT,
    }
    return TokenLosses(losses_B[:, None].expand_as(log_ratio_BT), metrics)
