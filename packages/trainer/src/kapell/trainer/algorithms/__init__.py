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
from kapell.trainer.algorithms.batching import micro_batches, num_micro_batches, plan_micro_batches
from kapell.trainer.algorithms.columns import PRODUCERS, TOKEN_COLUMNS
from kapell.trainer.algorithms.correction import Correction, Level, correct_rollout, importance_weights
from kapell.trainer.algorithms.gae import gae
from kapell.trainer.algorithms.gdpo import gdpo
from kapell.trainer.algorithms.group_baselines import dr_grpo, gpg, grpo, grpo_passk, opo, rloo
from kapell.trainer.algorithms.kl import KLKind, kl_estimate, kl_loss, kl_penalized_rewards
from kapell.trainer.algorithms.kl_control import (
    AdaptiveKLController,
    FixedKLController,
    KLController,
    adapted_kl_coefficient,
)
from kapell.trainer.algorithms.logits import (
    entropy_from_logits,
    entropy_loss,
    log_probs_from_logits,
    sum_pi_squared_from_logits,
)
from kapell.trainer.algorithms.masked import keep, masked_mean, masked_sum, masked_var, masked_whiten
from kapell.trainer.algorithms.metrics import Metric, Reduction, merge_metrics, metric_values
from kapell.trainer.algorithms.mismatch import mismatch_metrics
from kapell.trainer.algorithms.optimal_baseline import optimal_token_baseline
from kapell.trainer.algorithms.policy_gradients import cispo, dppo_tv, dro, gpg_loss, reinforce, sapo
from kapell.trainer.algorithms.policy_losses import (
    TokenLosses,
    get_policy_loss,
    policy_loss,
    policy_losses,
    register_policy_loss,
)
from kapell.trainer.algorithms.ppo import ppo_clip
from kapell.trainer.algorithms.registry import (
    MissingColumnError,
    Registry,
    call_with_columns,
    columns_of,
    options_of,
)
from kapell.trainer.algorithms.reinforce import reinforce_plus_plus, reinforce_plus_plus_baseline, remax
from kapell.trainer.algorithms.rejection import REJECTION_STATISTICS, rejection_mask, rejection_statistic
from kapell.trainer.algorithms.seeding import replica_seed
from kapell.trainer.algorithms.sequence import (
    mask_from_lengths,
    mask_up_to_eos,
    on_last_token,
    position_ids,
    response_lengths,
)
from kapell.trainer.algorithms.sequence_ratio import gmpo, gspo
from kapell.trainer.algorithms.shaping import missing_eos_penalty, soft_overlong_penalty
from kapell.trainer.algorithms.validation import best_at_k, majority_at_k, pass_at_k, validation_metrics
from kapell.trainer.algorithms.value_loss import value_loss

__all__ = [
    "PRODUCERS",
    "REJECTION_STATISTICS",
    "TOKEN_COLUMNS",
    "AdaptiveKLController",
    "Advantages",
    "Aggregation",
    "BatchTotals",
    "Correction",
    "FixedKLController",
    "KLController",
    "KLKind",
    "Level",
    "LossResult",
    "Metric",
    "MissingColumnError",
    "NormScope",
    "Reduction",
    "Registry",
    "TokenLosses",
    "adapted_kl_coefficient",
    "advantage_estimators",
    "aggregate",
    "aggregated_loss",
    "best_at_k",
    "call_with_columns",
    "cispo",
    "columns_of",
    "compute_advantages",
    "correct_rollout",
    "dppo_tv",
    "dr_grpo",
    "dro",
    "entropy_from_logits",
    "entropy_loss",
    "gae",
    "gdpo",
    "get_advantage_estimator",
    "get_policy_loss",
    "gmpo",
    "gpg",
    "gpg_loss",
    "grpo",
    "grpo_passk",
    "gspo",
    "importance_weights",
    "keep",
    "kl_estimate",
    "kl_loss",
    "kl_penalized_rewards",
    "log_probs_from_logits",
    "majority_at_k",
    "mask_from_lengths",
    "mask_up_to_eos",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "merge_metrics",
    "metric_values",
    "micro_batches",
    "mismatch_metrics",
    "missing_eos_penalty",
    "num_micro_batches",
    "on_last_token",
    "opo",
    "optimal_token_baseline",
    "options_of",
    "outcome_scores",
    "pass_at_k",
    "plan_micro_batches",
    "policy_loss",
    "policy_losses",
    "position_ids",
    "ppo_clip",
    "register_advantage_estimator",
    "register_policy_loss",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rejection_mask",
    "rejection_statistic",
    "remax",
    "replica_seed",
    "response_lengths",
    "rewards_to_go",
    "rloo",
    "sapo",
    "soft_overlong_penalty",
    "sum_pi_squared_from_logits",
    "validation_metrics",
    "value_loss",
]
