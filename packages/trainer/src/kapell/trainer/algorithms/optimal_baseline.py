"""A baseline of its own for every token, which minimises the variance of the policy gradient."""
# B rows, T response tokens; a trailing S counts only the valid tokens of a row, first to last

import torch
from torch import Tensor

from kapell.trainer.algorithms.advantages import Advantages, register_advantage_estimator, rewards_to_go
from kapell.trainer.algorithms.groups import Uid, group_rows
from kapell.trainer.algorithms.masked import as_mask, keep

__all__ = ["optimal_token_baseline"]

_WEIGHT_FLOOR = 1e-8  # tokens of probability 1 carry no gradient, so their weights may sum to zero


@register_advantage_estimator("optimal_token_baseline")
def optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Uid,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
) -> Advantages:
    """A_t = G_t - sum(G_t W_t)/sum(W_t) over the group, with W_t = sum_{u<=t} (1 - 2 p_u + sum p^2).

    `sum_pi_squared` is the sum over the vocabulary of squared probabilities. 1 - 2p + sum p^2 is the squared norm of
    the gradient of log p by the logits, so W_t is the energy of the path so far. (Greensmith et al., JMLR 5, 2004: the
    baseline of least variance weighs returns by it.) Importance weights rho scale it by rho^2.

    Tokens are matched by their number among the row's valid tokens. Where only one row of the group is that long there
    is nothing to compare with and the baseline is 0. Groups of one get advantage 0.
    """
    mask_BT = as_mask(response_mask)
    groups = group_rows(uid, mask_BT.any(-1))
    energy_BT = 1 - 2 * keep(mask_BT, old_log_probs).exp() + keep(mask_BT, sum_pi_squared)
    if rollout_is_weights is not None:
        energy_BT = energy_BT * keep(mask_BT, rollout_is_weights).square()
    returns_BT = rewards_to_go(token_level_rewards, mask_BT)
    order_BS = torch.argsort(~mask_BT, dim=-1, stable=True)  # valid tokens first, in their order
    valid_BS = mask_BT.gather(-1, order_BS)
    returns_BS = returns_BT.gather(-1, order_BS)
    weights_BS = keep(mask_BT, energy_BT).cumsum(-1).gather(-1, order_BS)
    weights_BS = keep(valid_BS, weights_BS)
    baseline_BS = groups.total(returns_BS * weights_BS) / (groups.total(weights_BS) + _WEIGHT_FLOOR)
    alone_BS = groups.total(valid_BS.long()) < 2
    advantages_BS = returns_BS - torch.where(alone_BS, torch.zeros_like(baseline_BS), baseline_BS)
    advantages_BS = keep(valid_BS & groups.informative()[:, None], advantages_BS)
    advantages_BT = torch.zeros_like(returns_BT).scatter(-1, order_BS, advantages_BS)
    return Advantages(advantages_BT, returns_BT, groups.metrics())
