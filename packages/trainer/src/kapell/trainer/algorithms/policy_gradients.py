"""Policy losses of the form weight times log-probability, and soft alternatives to the clip."""
# B rows, T response tokens

import torch
from torch import Tensor

from kapell.trainer.algorithms.correction import Level, importance_weights
from kapell.trainer.algorithms.masked import keep
from kapell.trainer.algorithms.policy_losses import TokenLosses, register_policy_loss
from kapell.trainer.algorithms.ppo import clip_bounds, limited_log_ratio

__all__ = ["cispo", "dppo_tv", "dro", "gpg_loss", "reinforce", "sapo"]


@register_policy_loss("cispo")
def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> TokenLosses:
    """-sg(clip(r, 1-low, 1+high)) A log p: every token keeps its gradient (MiniMax, 2506.13585, eq. 4 and 5)."""
    low, high = clip_bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    log_ratio_BT = limited_log_ratio(log_probs, old_log_probs, response_mask)
    ratio_BT = log_ratio_BT.detach().exp()
    clipped_BT = ratio_BT.clamp(1 - low, 1 + high)
    losses_BT = -clipped_BT * keep(response_mask, advantages) * keep(response_mask, log_probs)
    return TokenLosses(losses_BT, {"pg_clipfrac": ratio_BT != clipped_BT, "ppo_kl": -log_ratio_BT})


@register_policy_loss("gpg")
def gpg_loss(log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> TokenLosses:
    """-A log p, without a ratio (GPG, 2504.02546)."""
    return TokenLosses(-keep(response_mask, advantages) * keep(response_mask, log_probs))


@register_policy_loss("reinforce")
def reinforce(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    rollout_is: Level | str | None = None,
    rollout_is_threshold: float | str = 2.0,
) -> TokenLosses:
    """-sg(w) A log p with w the truncated p/p_old, or 1 without `rollout_is` (Williams 1992; weights as in TIS).

    For bypass, where `old_log_probs` are the sampler's: the weights then correct for staleness and mismatch at once.
    """
    log_ratio_BT = limited_log_ratio(log_probs, old_log_probs, response_mask)
    losses_BT = -keep(response_mask, advantages) * keep(response_mask, log_probs)
    if rollout_is is not None:
        weights_BT = importance_weights(
            log_probs.detach(), old_log_probs, response_mask, level=rollout_is, threshold=rollout_is_threshold
        )
        losses_BT = losses_BT * weights_BT
    return TokenLosses(losses_BT, {"ppo_kl": -log_ratio_BT})


@register_policy_loss("sapo")
def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> TokenLosses:
    """-A sigmoid(tau (r-1)) 4/tau: a soft gate for the clip (SAPO, 2511.20347); tau by the sign of A.

    The paper aggregates by `seq-mean-token-mean`.
    """
    advantages_BT = keep(response_mask, advantages)
    log_ratio_BT = limited_log_ratio(log_probs, old_log_probs, response_mask)
    positive_BT = torch.sigmoid(tau_pos * (log_ratio_BT.exp() - 1)) * (4 / tau_pos)
    negative_BT = torch.sigmoid(tau_neg * (log_ratio_BT.exp() - 1)) * (4 / tau_neg)
    gate_BT = torch.where(advantages_BT > 0, positive_BT, negative_BT)
    return TokenLosses(-advantages_BT * gate_BT, {"ppo_kl": -log_ratio_BT})


@register_policy_loss("dro")
def dro(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *, dro_beta: float | None
) -> TokenLosses:
    """-(A log p - beta/2 (log p/p_old)^2): a quadratic pull to the old policy (Richemond et al., 2405.19107)."""
    if dro_beta is None or dro_beta <= 0:
        raise ValueError(f"dro_beta, the pull to the old policy, must be positive, got {dro_beta}")
    log_probs_BT = keep(response_mask, log_probs)
    # Not limited: the square pulls back a token however far it went, and does not overflow.
    log_ratio_BT = log_probs_BT - keep(response_mask, old_log_probs)
    losses_BT = dro_beta / 2 * log_ratio_BT.square() - keep(response_mask, advantages) * log_probs_BT
    return TokenLosses(losses_BT, {"ppo_kl": -log_ratio_BT})


@register_policy_loss("dppo_tv")
def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    dppo_ratio_cap: float = 20.0,
) -> TokenLosses:
    """-A sg(min(r, cap)) log p on tokens within the trust region, 0 on the others (DPPO, 2602.04879).

    The region bounds the total variation of the token's own probability: p - p_old <= high where A > 0, and
    >= -low elsewhere. `clip_ratio` and its two bounds are differences of probabilities here.
    """
    low, high = clip_bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    advantages_BT = keep(response_mask, advantages)
    log_probs_BT, old_BT = keep(response_mask, log_probs), keep(response_mask, old_log_probs)
    log_ratio_BT = limited_log_ratio(log_probs, old_log_probs, response_mask)
    ratio_BT = log_ratio_BT.detach().exp()
    moved_BT = log_probs_BT.detach().exp() - old_BT.exp()
    inside_BT = torch.where(advantages_BT > 0, moved_BT <= high, moved_BT >= -low)
    losses_BT = -advantages_BT * ratio_BT.clamp(max=dppo_ratio_cap) * log_probs_BT * inside_BT
    metrics = {
        "pg_clipfrac": ~inside_BT,
        "pg_clipfrac_lower": inside_BT & (ratio_BT > dppo_ratio_cap),
        "ppo_kl": -log_ratio_BT,
    }
    return TokenLosses(losses_BT, metrics)
