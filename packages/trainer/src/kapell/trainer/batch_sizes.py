"""The portions of a step's batch that a configuration asks for: in updates, and in passes through the models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from .algorithms import NormScope
from .config import Config
from .micro_batches import MicroBatches
from .updates import UpdatePlan

__all__ = ["BatchSizes", "UpdatePlans", "batch_sizes", "check_token_budgets", "update_plans"]

_POLICY, _CRITIC = "actor_rollout_ref", "critic"

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """What goes through a model at once, on each worker."""

    actor: MicroBatches
    """Forward and backward through the policy."""
    log_prob: MicroBatches
    """Forward through the policy."""
    ref: MicroBatches
    """Forward through the reference."""
    critic: MicroBatches
    """Forward and backward through the critic."""
    values: MicroBatches
    """Forward through the critic."""


def batch_sizes(config: Config) -> BatchSizes:
    """The sizes, with those that are null taken from where they are inherited."""
    models, critic = config.actor_rollout_ref, config.critic
    actor, rollout, ref = models.actor, models.rollout, models.ref
    by_tokens = _first(rollout.log_prob_use_dynamic_bsz, actor.use_dynamic_bsz)
    tokens = _first(rollout.log_prob_max_token_len_per_gpu, actor.ppo_max_token_len_per_gpu)
    rows = rollout.log_prob_micro_batch_size_per_gpu
    critic_by_tokens = _first(critic.use_dynamic_bsz, actor.use_dynamic_bsz)
    critic_tokens = _first(critic.ppo_max_token_len_per_gpu, actor.ppo_max_token_len_per_gpu)
    return BatchSizes(
        actor=_sizes(actor.use_dynamic_bsz, actor.ppo_micro_batch_size_per_gpu, actor.ppo_max_token_len_per_gpu),
        log_prob=_sizes(by_tokens, rows, tokens),
        ref=_sizes(
            _first(ref.log_prob_use_dynamic_bsz, by_tokens),
            _first(ref.log_prob_micro_batch_size_per_gpu, rows),
            _first(ref.log_prob_max_token_len_per_gpu, tokens),
        ),
        critic=_sizes(critic_by_tokens, critic.ppo_micro_batch_size_per_gpu, critic_tokens),
        values=_sizes(
            critic_by_tokens,
            critic.forward_micro_batch_size_per_gpu,
            _first(critic.forward_max_token_len_per_gpu, critic_tokens),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class UpdatePlans:
    """How models go over a step's batch."""

    actor: UpdatePlan
    """The policy."""
    critic: UpdatePlan
    """The critic: where its own keys say nothing, as the policy."""


def update_plans(config: Config) -> UpdatePlans:
    """The plans, whether or not there is a critic."""
    actor, critic, sizes = config.actor_rollout_ref.actor, config.critic, batch_sizes(config)
    return UpdatePlans(
        actor=UpdatePlan(
            epochs=actor.ppo_epochs,
            prompts_per_mini_batch=actor.ppo_mini_batch_size,
            micro_batches=sizes.actor,
            shuffle=actor.shuffle,
            balance=config.trainer.balance_batch,
            target_kl=actor.target_kl,
            whiten_advantages=config.algorithm.norm_scope == NormScope.MINI_BATCH,
        ),
        critic=UpdatePlan(
            epochs=_first(critic.ppo_epochs, actor.ppo_epochs),
            prompts_per_mini_batch=_first(critic.ppo_mini_batch_size, actor.ppo_mini_batch_size),
            micro_batches=sizes.critic,
            shuffle=_first(critic.shuffle, actor.shuffle),
            balance=config.trainer.balance_batch,
        ),
    )


def check_token_budgets(config: Config, longest_prompt: int) -> None:
    """Refuse micro-batches that are too small for the longest prompt, in tokens, with the longest response.

    Raises ``ValueError`` with the key.
    """
    sizes, longest = batch_sizes(config), longest_prompt + config.data.max_response_length
    budgets = {f"{_POLICY}.actor.ppo_max_token_len_per_gpu": sizes.actor}
    if not config.algorithm.rollout_correction.bypass_mode:
        budgets[f"{_POLICY}.rollout.log_prob_max_token_len_per_gpu"] = sizes.log_prob
    if config.use_reference:
        budgets[f"{_POLICY}.ref.log_prob_max_token_len_per_gpu"] = sizes.ref
    if config.use_critic:
        budgets[f"{_CRITIC}.ppo_max_token_len_per_gpu"] = sizes.critic
        budgets[f"{_CRITIC}.forward_max_token_len_per_gpu"] = sizes.values
    for key, size in budgets.items():
        if size.max_tokens is not None and size.max_tokens < longest:
            raise ValueError(
                f"{key}={size.max_tokens} is below the {longest} tokens of a row: the longest training prompt has "
                f"{longest_prompt}, and data.max_response_length is {config.data.max_response_length}; raise it to "
                f"{longest}"
            )


def _first(value: Value | None, inherited: Value) -> Value:
    return inherited if value is None else value


def _sizes(by_tokens: bool, max_rows: int | None, max_tokens: int) -> MicroBatches:
    return MicroBatches(max_tokens=max_tokens) if by_tokens else MicroBatches(max_rows=max_rows)
