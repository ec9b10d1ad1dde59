"""Outcome advantages relative to the other answers of the same prompt, one scalar per row spread over its tokens.

A group of one has nothing to compare with: its advantage is 0, and the metric `adv/singleton_groups` counts it. Rows
without a valid token stay out of their group.
"""
# B rows, T response tokens

import torch
from torch import Tensor

from kapell.trainer.algorithms.advantages import (
    Advantages,
    NormScope,
    outcome_scores,
    register_advantage_estimator,
    rewards_to_go,
)
from kapell.trainer.algorithms.groups import Groups, Uid, group_rows
from kapell.trainer.algorithms.masked import as_mask, keep

__all__ = ["dr_grpo", "gpg", "grpo", "grpo_passk", "grpo_scores", "opo", "rloo"]

_STD_FLOOR = 1e-6  # as in the reference implementations of GRPO


@register_advantage_estimator("grpo")
def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Uid,
    *,
    norm_scope: NormScope | str = NormScope.GROUP,
    unbiased_std: bool = True,
) -> Advantages:
    """A = (s - group mean)/(std + 1e-6) (Shao et al., 2402.03300, sec. 4.1.2).

    The std is of the group, or of the batch for `norm_scope="batch"`, or left out for "none". It is the sample's
    (n - 1), as all implementations have it, or the population's with `unbiased_std=False`.
    """
    scores_B, groups = _scores_and_groups(token_level_rewards, response_mask, uid)
    advantages_B = grpo_scores(scores_B, groups, norm_scope=norm_scope, unbiased_std=unbiased_std)
    return _spread(advantages_B, token_level_rewards, response_mask, groups)


def grpo_scores(
    scores_B: Tensor, groups: Groups, *, norm_scope: NormScope | str = NormScope.GROUP, unbiased_std: bool = True
) -> Tensor:
    """GRPO's advantage of each row, (B,) -> (B,)."""
    scope = NormScope(norm_scope)
    centered_B = _centered(scores_B, groups)
    if scope is NormScope.GROUP:
        return centered_B / (groups.std(scores_B, unbiased=unbiased_std) + _STD_FLOOR)
    if scope is NormScope.BATCH:
        everyone = Groups(torch.zeros_like(groups.index), groups.counted, 1)
        return centered_B / (everyone.std(scores_B, unbiased=unbiased_std) + _STD_FLOOR)
    return centered_B


@register_advantage_estimator("dr_grpo")
def dr_grpo(token_level_rewards: Tensor, response_mask: Tensor, uid: Uid) -> Advantages:
    """A = s - group mean, without a std (Liu et al., 2503.20783); goes with `seq-mean-token-sum-norm`."""
    scores_B, groups = _scores_and_groups(token_level_rewards, response_mask, uid)
    return _spread(_centered(scores_B, groups), token_level_rewards, response_mask, groups)


@register_advantage_estimator("rloo")
def rloo(token_level_rewards: Tensor, response_mask: Tensor, uid: Uid) -> Advantages:
    """A = s - mean of the others = k/(k-1) (s - group mean) (Ahmadian et al., 2402.14740)."""
    scores_B, groups = _scores_and_groups(token_level_rewards, response_mask, uid)
    size_B = groups.size()
    advantages_B = _centered(scores_B, groups) * size_B / (size_B - 1).clamp(min=1)
    return _spread(advantages_B, token_level_rewards, response_mask, groups)


@register_advantage_estimator("opo")
def opo(token_level_rewards: Tensor, response_mask: Tensor, uid: Uid) -> Advantages:
    """A = s - sum(L s)/sum(L) over the group, L the response length (OPO, 2505.23585)."""
    scores_B, groups = _scores_and_groups(token_level_rewards, response_mask, uid)
    lengths_B = as_mask(response_mask).sum(-1).to(scores_B.dtype)
    baseline_B = groups.total(lengths_B * scores_B) / groups.total(lengths_B).clamp(min=1)
    advantages_B = torch.where(groups.spread(scores_B), scores_B - baseline_B, torch.zeros_like(scores_B))
    return _spread(advantages_B, token_level_rewards, response_mask, groups)


@register_advantage_estimator("grpo_passk")
def grpo_passk(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Uid,
    *,
    norm_scope: NormScope | str = NormScope.GROUP,
    unbiased_std: bool = True,
) -> Advantages:
    """Only the best of a group: A = (best - second best)/(std + 1e-6), else 0 (2503.19595). A tie for best gives 0."""
    scores_B, groups = _scores_and_groups(token_level_rewards, response_mask, uid)
    best_B = groups.maximum(scores_B)
    is_best_B = groups.counted & (scores_B == best_B)
    # A lone best is taken out to find the second; with a tie the gap is zero anyway.
    below_B = torch.where(is_best_B, torch.full_like(scores_B, -torch.inf), scores_B)
    gap_B = best_B - groups.maximum(below_B)
    lone_best_B = is_best_B & (groups.total(is_best_B.long()) == 1) & groups.informative()
    scope = NormScope(norm_scope)
    if scope is NormScope.BATCH:
        raise ValueError("grpo_passk scales by group or not at all; norm_scope is one of group, none, mini-batch")
    if scope is NormScope.GROUP:
        gap_B = gap_B / (groups.std(scores_B, unbiased=unbiased_std) + _STD_FLOOR)
    advantages_B = torch.where(lone_best_B, gap_B, torch.zeros_like(scores_B))
    return _spread(advantages_B, token_level_rewards, response_mask, groups)


@register_advantage_estimator("gpg")
def gpg(token_level_rewards: Tensor, response_mask: Tensor, uid: Uid, *, f_norm: float = 1.0) -> Advantages:
    """A = alpha (s - group mean)/F with alpha = B/(B - M), M the samples in groups without spread (GPG, 2504.02546).

    If no group has spread there is no signal and A is 0.
    """
    scores_B, groups = _scores_and_groups(token_level_rewards, response_mask, uid)
    spread_B = groups.counted & groups.spread(scores_B)
    alpha = int(groups.counted.sum()) / max(int(spread_B.sum()), 1)
    return _spread(alpha * _centered(scores_B, groups) / f_norm, token_level_rewards, response_mask, groups)


def _scores_and_groups(token_level_rewards: Tensor, response_mask: Tensor, uid: Uid) -> tuple[Tensor, Groups]:
    groups = group_rows(uid, as_mask(response_mask).any(-1))
    return outcome_scores(token_level_rewards, response_mask), groups


def _centered(scores_B: Tensor, groups: Groups) -> Tensor:
    keeps_signal_B = groups.informative() & groups.spread(scores_B)
    return torch.where(keeps_signal_B, scores_B - groups.mean(scores_B), torch.zeros_like(scores_B))


def _spread(advantages_B: Tensor, token_level_rewards: Tensor, response_mask: Tensor, groups: Groups) -> Advantages:
    advantages_BT = keep(response_mask, advantages_B[:, None].expand_as(token_level_rewards))
    return Advantages(advantages_BT, rewards_to_go(token_level_rewards, response_mask), groups.metrics())
