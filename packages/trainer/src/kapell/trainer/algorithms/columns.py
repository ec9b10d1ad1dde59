"""The columns that algorithms may name: who writes each, and which hold one number for each response token."""
# B rows, T response tokens

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kapell.trainer.algorithms.masked import keep

__all__ = ["PRODUCERS", "TOKEN_COLUMNS", "select_valid"]

_TOKEN_PRODUCERS = {
    "rollout_log_probs": "rollout",
    "rm_scores": "reward",
    "old_log_probs": "actor.compute_log_prob",
    "entropys": "actor.compute_log_prob",
    "sum_pi_squared": "actor.compute_log_prob",
    "ref_log_prob": "reference.compute_ref_log_prob",
    "values": "critic.compute_values",
    "vpreds": "the critic's forward pass",
    "log_probs": "the actor's forward pass",
    "token_level_scores": "the reward stage",
    "token_level_rewards": "the reward stage (after the KL penalty, if any)",
    "advantages": "the advantage stage",
    "returns": "the advantage stage",
    "rollout_is_weights": "the rollout correction",
}

TOKEN_COLUMNS = frozenset(_TOKEN_PRODUCERS)
"""Float columns of shape (B, T)."""

PRODUCERS: Mapping[str, str] = _TOKEN_PRODUCERS | {
    "uid": "data",
    "responses": "rollout",
    "response_mask": "rollout",
    "reward_baselines": "rollout (greedy) and reward",
    "reward_components": "reward",
    "loss_mask": "the rollout correction",
}
"""Who writes each column."""


def select_valid(columns: Mapping[str, Any], mask_BT: Tensor) -> dict[str, Any]:
    """The columns, those of `TOKEN_COLUMNS` with zeros in masked slots.

    They are told by name: a (B, K) column of something else may well have the mask's shape.
    """
    return {name: keep(mask_BT, column) if name in TOKEN_COLUMNS else column for name, column in columns.items()}
