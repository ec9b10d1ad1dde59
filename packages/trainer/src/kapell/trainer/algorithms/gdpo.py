"""Advantages from several rewards, each normalised on its own (GDPO, 2601.05242)."""
# B rows, T response tokens, K reward components

from collections.abc import Sequence

import torch
from torch import Tensor

from kapell.trainer.algorithms.advantages import (
    Advantages,
    NormScope,
    register_advantage_estimator,
    rewards_to_go,
    whiten_in_scope,
)
from kapell.trainer.algorithms.group_baselines import grpo_scores
from kapell.trainer.algorithms.groups import Uid, group_rows
from kapell.trainer.algorithms.masked import as_mask, widen

__all__ = ["gdpo"]


@register_advantage_estimator("gdpo")
def gdpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Uid,
    reward_components: Tensor,
    *,
    component_weights: Sequence[float] | None = None,
    norm_scope: NormScope | str = NormScope.BATCH,
) -> Advantages:
    """A = whiten(sum_k w_k GRPO(r_k)) over the tokens of the batch (GDPO, 2601.05242).

    `reward_components` is (B, K); w_k is 1 by default. Each component is scaled within its group first, so none drowns
    another by its size. Groups of one get 0.
    """
    mask_BT = as_mask(response_mask)
    groups = group_rows(uid, mask_BT.any(-1))
    components_BK = widen(reward_components)
    num_components = components_BK.shape[-1]
    weights = [1.0] * num_components if component_weights is None else list(component_weights)
    if len(weights) != num_components:
        raise ValueError(f"{len(weights)} component_weights for {num_components} reward components")
    scores_B = torch.stack([weight * grpo_scores(components_BK[:, k], groups) for k, weight in enumerate(weights)]).sum(
        0
    )
    compared_BT = mask_BT & groups.informative()[:, None]
    advantages_BT = whiten_in_scope(scores_B[:, None].expand_as(mask_BT), compared_BT, norm_scope)
    return Advantages(advantages_BT, rewards_to_go(token_level_rewards, mask_BT), groups.metrics())
