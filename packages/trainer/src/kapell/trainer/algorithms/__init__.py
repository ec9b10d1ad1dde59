"""Algorithms as pure functions on tensors: advantages, losses, KL, corrections, batching, metrics.

How a training loop calls them (B rows, T padded response tokens; masks may be bool, int or float):

    columns = {"token_level_rewards": ..., "response_mask": ..., "uid": ..., "values": ...}   # any mapping
    advantages, returns, metrics = compute_advantages("grpo", columns, {"norm_scope": "group"})

    totals = BatchTotals.of(loss_mask)                       # of the WHOLE mini-batch: sum them over the ranks with
    totals = BatchTotals.combined(per_rank, dp_size=ranks)   # this, or all-reduce the two counts
    for micro in micro_batches:                              # columns of one micro-batch, with its fresh "log_probs"
        loss, metrics = policy_loss("vanilla", micro, {"clip_ratio": 0.2}, mode="token-mean", totals=totals)
        kl, more = kl_loss(micro["log_probs"], micro["ref_log_prob"], micro["loss_mask"], kind="k3",
                           mode="token-mean", totals=totals)
        (loss + kl_coef * kl).backward()                     # add up over micro-batches, average over ranks
    numbers = metric_values(merge_metrics(all_metrics))      # over micro-batches, ranks and mini-batches, in any order

An estimator or loss gets the columns named by its positional parameters and the options named by its keyword-only ones;
the rest of both mappings is left aside, so one mapping of config keys serves all. `columns_of(fn)` and `options_of(fn)`
say which; `"uid" in columns_of(fn)` tells a group estimator. A name or `pkg.mod:attr` is accepted everywhere.
"""

from kapell.trainer.algorithms.advantages import (
    Advantages,
    NormScope,
    advantage_estimators,
    compute_advantages,
    get_advantage_estimator,
    outcome_scores,
    register_advantage_estimator,
    rewards_to_go,
)
from kapell.trainer.algorithms.aggregation import Aggregation, BatchTotals, LossResult, aggregate, aggregated_loss
from kapell.trainer.algorithms.gae import gae
from kapell.trainer.algorithms.group_baselines import dr_grpo, gpg, grpo, grpo_passk, opo, rloo
from kapell.trainer.algorithms.kl import KLKind, kl_estimate, kl_loss, kl_penalized_rewards
from kapell.trainer.algorithms.logits import entropy_from_logits, log_probs_from_logits, sum_pi_squared_from_logits
from kapell.trainer.algorithms.masked import keep, masked_mean, masked_sum, masked_var, masked_whiten
from kapell.trainer.algorithms.metrics import Metric, Reduction, merge_metrics, metric_values
from kapell.trainer.algorithms.policy_losses import (
    TokenLosses,
    get_policy_loss,
    policy_loss,
    policy_losses,
    register_policy_loss,
)
from kapell.trainer.algorithms.ppo import ppo_clip
from kapell.trainer.algorithms.registry import MissingColumnError, call_with_columns, columns_of, options_of
from kapell.trainer.algorithms.sequence import mask_from_lengths, mask_up_to_eos, position_ids
from kapell.trainer.algorithms.value_loss import value_loss

__all__ = [
    "Advantages",
    "Aggregation",
    "BatchTotals",
    "KLKind",
    "LossResult",
    "Metric",
    "MissingColumnError",
    "NormScope",
    "Reduction",
    "TokenLosses",
    "advantage_estimators",
    "aggregate",
    "aggregated_loss",
    "call_with_columns",
    "columns_of",
    "compute_advantages",
    "dr_grpo",
    "entropy_from_logits",
    "gae",
    "get_advantage_estimator",
    "get_policy_loss",
    "gpg",
    "grpo",
    "grpo_passk",
    "keep",
    "kl_estimate",
    "kl_loss",
    "kl_penalized_rewards",
    "log_probs_from_logits",
    "mask_from_lengths",
    "mask_up_to_eos",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "merge_metrics",
    "metric_values",
    "opo",
    "options_of",
    "outcome_scores",
    "policy_loss",
    "policy_losses",
    "position_ids",
    "ppo_clip",
    "register_advantage_estimator",
    "register_policy_loss",
    "rewards_to_go",
    "rloo",
    "sum_pi_squared_from_logits",
    "value_loss",
]
