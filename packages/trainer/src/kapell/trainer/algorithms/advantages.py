"""The registry of advantage estimators and the call that every estimator goes through.

An estimator names the columns that it reads and returns advantages and returns, both (B, T):

    @register_advantage_estimator("centered")
    def centered(token_level_rewards, response_mask, *, scale=1.0): ...
"""
# B rows, T response tokens

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kapell.trainer.algorithms.columns import select_valid
from kapell.trainer.algorithms.masked import as_mask, keep, masked_whiten
from kapell.trainer.algorithms.metrics import Metric
from kapell.trainer.algorithms.registry import MissingColumnError, Registry, call_with_columns

__all__ = [
    "Advantages",
    "NormScope",
    "advantage_estimators",
    "compute_advantages",
    "get_advantage_estimator",
    "outcome_scores",
    "register_advantage_estimator",
    "rewards_to_go",
    "whiten_in_scope",
]


class NormScope(StrEnum):
    """Over what advantages are scaled to unit spread; the key `algorithm.norm_scope`."""

    NONE = "none"
    """not at all"""
    GROUP = "group"
    """over the answers to one prompt"""
    BATCH = "batch"
    """over the whole batch"""
    MINI_BATCH = "mini-batch"
    """by the update, over each mini-batch with `masked_whiten`; the estimator leaves them unscaled"""

    @classmethod
    def _missing_(cls, value: object) -> "NormScope":
        raise ValueError(f"unknown scope of normalisation {value!r}; known: {', '.join(cls)}")


class Advantages(NamedTuple):
    """What an estimator returns; both tensors are zero in masked slots."""

    advantages: Tensor
    """(B, T), for the actor"""
    returns: Tensor
    """(B, T), the critic's target"""
    metrics: Mapping[str, Metric] = {}


AdvantageEstimator = Callable[..., Advantages | tuple[Tensor, Tensor]]

advantage_estimators: Registry[AdvantageEstimator] = Registry("advantage estimator")
register_advantage_estimator = advantage_estimators.register
get_advantage_estimator = advantage_estimators.get


@torch.no_grad()
def compute_advantages(
    estimator: str | AdvantageEstimator, columns: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> Advantages:
    """Call an estimator (by name, import path or itself) with the columns and options that it names.

    `response_mask` must be among the columns. Token columns (`columns.TOKEN_COLUMNS`) reach the estimator with zeros in
    masked slots. A reward in a masked slot is an error, since some estimators would count it and
    others not.
    """
    function = get_advantage_estimator(estimator) if isinstance(estimator, str) else estimator
    if "response_mask" not in columns:
        raise MissingColumnError("compute_advantages", "response_mask", tuple(sorted(columns)))
    mask_BT = as_mask(columns["response_mask"])
    if "token_level_rewards" in columns:
        _refuse_masked_rewards(columns["token_level_rewards"], mask_BT)
    result = call_with_columns(function, select_valid(columns, mask_BT) | {"response_mask": mask_BT}, options)
    advantages_BT, returns_BT, *metrics = result
    return Advantages(keep(mask_BT, advantages_BT), keep(mask_BT, returns_BT), dict(*metrics))


def _refuse_masked_rewards(rewards_BT: Tensor, mask_BT: Tensor) -> None:
    rows, tokens = torch.nonzero(~mask_BT & (rewards_BT != 0), as_tuple=True)
    if len(rows):
        row, token = int(rows[0]), int(tokens[0])
        raise ValueError(
            f"{len(rows)} rewards lie on masked tokens, the first at row {row}, token {token}: "
            f"{float(rewards_BT[row, token])}; put a reward on a token with response_mask 1"
        )


def outcome_scores(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """One score per row: the sum of its rewards, (B, T) -> (B,)."""
    return keep(response_mask, token_level_rewards).sum(-1)


def rewards_to_go(token_level_rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """G_t = r_t + gamma G_{t+1} over valid tokens; masked ones are passed over without a discount, (B, T)."""
    rewards_BT = keep(response_mask, token_level_rewards)
    if gamma == 1.0:
        return keep(response_mask, rewards_BT.flip(-1).cumsum(-1).flip(-1))
    mask_BT = as_mask(response_mask)
    running_B = torch.zeros_like(rewards_BT[:, 0])
    returns_BT = torch.zeros_like(rewards_BT)
    for t in reversed(range(rewards_BT.shape[-1])):
        running_B = torch.where(mask_BT[:, t], rewards_BT[:, t] + gamma * running_B, running_B)
        returns_BT[:, t] = running_B
    return keep(mask_BT, returns_BT)


def whiten_in_scope(advantages_BT: Tensor, mask_BT: Tensor, scope: NormScope | str) -> Tensor:
    """Whitened over the batch, or unchanged for `none` and `mini-batch`; zeros in masked slots."""
    scope = NormScope(scope)
    if scope is NormScope.GROUP:
        raise ValueError("this estimator has no groups; norm_scope is one of none, batch, mini-batch")
    return masked_whiten(advantages_BT, mask_BT) if scope is NormScope.BATCH else keep(mask_BT, advantages_BT)
