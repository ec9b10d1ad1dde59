"""REINFORCE with global whitening, with a group baseline, and with the greedy answer as the baseline."""
# B rows, T response tokens

from torch import Tensor

from kapell.trainer.algorithms.advantages import (
    Advantages,
    NormScope,
    outcome_scores,
    register_advantage_estimator,
    rewards_to_go,
    whiten_in_scope,
)
from kapell.trainer.algorithms.groups import Uid, group_rows
from kapell.trainer.algorithms.masked import as_mask, keep

__all__ = ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax"]


@register_advantage_estimator("reinforce_plus_plus")
def reinforce_plus_plus(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    norm_scope: NormScope | str = NormScope.BATCH,
) -> Advantages:
    """G_t = r_t + gamma G_{t+1} on valid tokens, A = whiten(G) over the batch (Hu, 2501.03262).

    The rewards hold the KL penalty already.
    """
    returns_BT = rewards_to_go(token_level_rewards, response_mask, gamma=gamma)
    return Advantages(whiten_in_scope(returns_BT, as_mask(response_mask), norm_scope), returns_BT)


@register_advantage_estimator("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Uid,
    *,
    norm_scope: NormScope | str = NormScope.BATCH,
) -> Advantages:
    """A = whiten(s - group mean) over the tokens of the batch (Hu, 2501.03262).

    Each row weighs as many times as it has tokens, so the whitening's mean is not zero over rows and a group of equal
    scores gets a small advantage. Groups of one stay out of the whitening and get 0.
    """
    mask_BT = as_mask(response_mask)
    groups = group_rows(uid, mask_BT.any(-1))
    scores_B = outcome_scores(token_level_rewards, mask_BT)
    centered_BT = (scores_B - groups.mean(scores_B))[:, None].expand_as(mask_BT)
    compared_BT = mask_BT & groups.informative()[:, None]
    advantages_BT = whiten_in_scope(centered_BT, compared_BT, norm_scope)
    return Advantages(advantages_BT, rewards_to_go(token_level_rewards, mask_BT), groups.metrics())


@register_advantage_estimator("remax")
def remax(token_level_rewards: Tensor, response_mask: Tensor, reward_baselines: Tensor) -> Advantages:
    """A_t = sum_{u>=t} r_u - score of the greedy answer to the same prompt, (B,) (Li et al., 2310.10505)."""
    returns_BT = rewards_to_go(token_level_rewards, response_mask)
    return Advantages(keep(response_mask, returns_BT - reward_baselines[:, None]), returns_BT)
