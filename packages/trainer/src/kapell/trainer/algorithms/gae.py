"""Generalised advantage estimation (Schulman et al., 1506.02438)."""
# B rows, T response tokens

import torch
from torch import Tensor

from kapell.trainer.algorithms.advantages import Advantages, NormScope, register_advantage_estimator, whiten_in_scope
from kapell.trainer.algorithms.masked import as_mask, keep

__all__ = ["gae"]


@register_advantage_estimator("gae")
def gae(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    norm_scope: NormScope | str = NormScope.BATCH,
) -> Advantages:
    """A_t = d_t + gamma lam A_{t+1} with d_t = r_t + gamma V_{t+1} - V_t (1506.02438, eq. 16); returns R_t = A_t + V_t.

    All (B, T). `t+1` is the next token of the model: observation tokens inside a response (mask 0) are passed over, so
    neither their values nor their number matter. After the last one V and A are 0. R comes from A before whitening.
    """
    mask_BT = as_mask(response_mask)
    rewards_BT, values_BT = keep(mask_BT, token_level_rewards), keep(mask_BT, values)
    next_value_B = torch.zeros_like(values_BT[:, 0])
    next_advantage_B = torch.zeros_like(next_value_B)
    advantages_BT = torch.zeros_like(values_BT)
    for t in reversed(range(values_BT.shape[-1])):
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        advantage_B = delta_B + gamma * lam * next_advantage_B
        advantages_BT[:, t] = advantage_B
        next_value_B = torch.where(mask_BT[:, t], values_BT[:, t], next_value_B)
        next_advantage_B = torch.where(mask_BT[:, t], advantage_B, next_advantage_B)
    returns_BT = keep(mask_BT, advantages_BT + values_BT)
    return Advantages(whiten_in_scope(advantages_BT, mask_BT, norm_scope), returns_BT)
