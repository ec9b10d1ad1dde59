"""The algorithms that a configuration names: their options, and every mistake in them that shows before a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch

from .algorithms import (
    TOKEN_COLUMNS,
    Aggregation,
    KLKind,
    MissingColumnError,
    advantage_estimators,
    columns_of,
    compute_advantages,
    correct_rollout,
    get_advantage_estimator,
    get_policy_loss,
    options_of,
)
from .config import AlgorithmConfig, Config, RolloutCorrectionConfig
from .stage import stage_spec_of
from .stages import Stages

__all__ = ["advantage_options", "check_algorithms", "estimator_reads", "policy_loss_options"]

_PROMPT_COLUMNS = ("uid", "data_source", "ground_truth", "extra_info", "index", "prompts", "prompt_mask")


def check_algorithms(config: Config) -> None:
    """Refuse names, options and needs for columns that no stage can serve, before anything is loaded."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    for key, look_up, name in (
        ("algorithm.adv_estimator", get_advantage_estimator, algorithm.adv_estimator),
        ("algorithm.kl_penalty", KLKind, algorithm.kl_penalty),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", get_policy_loss, actor.policy_loss.loss_mode),
        ("actor_rollout_ref.actor.loss_agg_mode", Aggregation, actor.loss_agg_mode),
        ("actor_rollout_ref.actor.kl_loss_type", KLKind, actor.kl_loss_type),
        *([("critic.loss_agg_mode", Aggregation, mode)] if (mode := config.critic.loss_agg_mode) else []),
    ):
        try:
            look_up(name)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{key}: {error}") from None
    estimator, loss = get_advantage_estimator(algorithm.adv_estimator), get_policy_loss(actor.policy_loss.loss_mode)
    _check_options("algorithm.adv_options", estimator, algorithm.adv_options, advantage_options(config, ()))
    _check_group_size(config)
    _check_penalties(config)
    _check_norm_scope(algorithm)
    _check_correction(algorithm.rollout_correction)
    _check_options(
        "actor_rollout_ref.actor.policy_loss.options", loss, actor.policy_loss.options, policy_loss_options(config)
    )
    made = _columns_made(config)
    _check_columns(f"algorithm.adv_estimator={algorithm.adv_estimator}", estimator, made)
    loss_key = f"actor_rollout_ref.actor.policy_loss.loss_mode={actor.policy_loss.loss_mode}"
    if actor.target_kl is not None and "old_log_probs" not in columns_of(loss):
        raise ValueError(
            f"actor_rollout_ref.actor.target_kl={actor.target_kl}: {loss_key} does not read old_log_probs, so nothing "
            "tells how far the policy has moved; leave the key out"
        )
    _check_columns(loss_key, loss, made | {"advantages", "returns", "log_probs"})


def advantage_options(config: Config, component_weights: Sequence[float]) -> dict[str, Any]:
    """The options of the advantage estimator: the keys that it knows, then ``algorithm.adv_options``."""
    algorithm = config.algorithm
    known = options_of(get_advantage_estimator(algorithm.adv_estimator))
    common = {
        "gamma": algorithm.gamma,
        "lam": algorithm.lam,
        "norm_scope": algorithm.norm_scope,
        "component_weights": list(component_weights),
    }
    chosen = {name: value for name, value in common.items() if name in known and value is not None}
    return {**chosen, **algorithm.adv_options}


def policy_loss_options(config: Config) -> dict[str, Any]:
    """The options of the policy loss: the clip ranges, then ``policy_loss.options``."""
    actor = config.actor_rollout_ref.actor
    return {
        "clip_ratio": actor.clip_ratio,
        "clip_ratio_low": actor.clip_ratio_low,
        "clip_ratio_high": actor.clip_ratio_high,
        "clip_ratio_c": actor.clip_ratio_c,
        **actor.policy_loss.options,
    }


def _check_options(
    key: str, function: Callable[..., Any], given: Mapping[str, Any], complete: Mapping[str, Any]
) -> None:
    known = options_of(function)
    name = getattr(function, "__name__", repr(function))
    for option in given:
        if option not in known:
            close = get_close_matches(option, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{key}: {name} has no option {option!r}{hint}; it has: {', '.join(known) or 'none'}")
    for option, default in known.items():
        if default is inspect.Parameter.empty and option not in complete:
            raise ValueError(f"{key}: {name} needs the option {option!r}; set {key}.{option}")


def estimator_reads(config: Config, column: str) -> bool:
    """Whether the advantage estimator needs a column."""
    return columns_of(get_advantage_estimator(config.algorithm.adv_estimator)).get(column, False)


def _check_group_size(config: Config) -> None:
    """Refuse one response per prompt where the estimator compares the responses to a prompt: all would be even."""
    name, samples = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    if samples == 1 and name in advantage_estimators and estimator_reads(config, "uid"):
        raise ValueError(
            f"algorithm.adv_estimator={name} compares the responses to a prompt, and actor_rollout_ref.rollout.n=1 is "
            "one; set it to 2 or more, or choose gae, reinforce_plus_plus or remax"
        )


def _check_penalties(config: Config) -> None:
    """Refuse penalties in token rewards where the estimator compares the single rewards before any penalty."""
    if not estimator_reads(config, "reward_components"):
        return
    for key, given in (
        ("algorithm.use_kl_in_reward=true", config.algorithm.use_kl_in_reward),
        ("reward.overlong_buffer.enable=true", config.reward.overlong_buffer.enable),
        ("reward.missing_eos_penalty", config.reward.missing_eos_penalty is not None),
    ):
        if given:
            raise ValueError(
                f"{key}: algorithm.adv_estimator={config.algorithm.adv_estimator} makes advantages of the single "
                "rewards, which the penalty does not change; leave the key out, or write the penalty as one of "
                "reward.terms"
            )


def _check_norm_scope(algorithm: AlgorithmConfig) -> None:
    estimator, scope = get_advantage_estimator(algorithm.adv_estimator), algorithm.norm_scope
    if scope is None:
        return
    key = f"algorithm.norm_scope={scope}"
    if "norm_scope" not in options_of(estimator):
        raise ValueError(f"{key}: {algorithm.adv_estimator} scales over nothing else; leave the key out")
    columns: dict[str, Any] = dict.fromkeys(TOKEN_COLUMNS, torch.zeros(2, 1)) | {"uid": [0, 0]}
    columns |= {"response_mask": torch.ones(2, 1), "reward_components": torch.zeros(2, 1)}
    try:
        compute_advantages(estimator, columns, {"component_weights": [1.0], "norm_scope": scope})
    except MissingColumnError:
        return
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _check_correction(correction: RolloutCorrectionConfig) -> None:
    one = torch.zeros(1, 1)
    try:
        correct_rollout(one, one, torch.ones(1, 1), **vars(correction))
    except ValueError as error:
        raise ValueError(f"algorithm.rollout_correction: {error}") from None


def _columns_made(config: Config) -> set[str]:
    """The columns that the stages of this configuration make before the advantages."""
    unused = {"adv", "update_actor", "update_critic"}
    unused |= set() if config.use_reference else {"ref"}
    unused |= set() if config.use_critic else {"values"}
    unused |= set() if estimator_reads(config, "reward_baselines") else {"gen_max"}
    correction = config.algorithm.rollout_correction
    made = set(_PROMPT_COLUMNS)
    for method in vars(Stages).values():
        spec = stage_spec_of(method)
        if spec is not None and spec.name not in unused:
            made |= set(spec.writes)
    if correction.bypass_mode:
        made -= {"entropys", "sum_pi_squared"}
    made -= set() if correction.rollout_is else {"rollout_is_weights"}
    made -= set() if correction.rollout_rs else {"loss_mask"}
    return made


def _check_columns(key: str, function: Callable[..., Any], made: set[str]) -> None:
    missing = sorted(name for name, needed in columns_of(function).items() if needed and name not in made)
    if missing:
        raise ValueError(
            f"{key} needs the column {', '.join(missing)}, which no stage of this trainer makes; write a step function "
            "with a stage for it, or choose another"
        )
