"""Trains a prepared run: its stages and step over the groups of its roles."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kapell.workergroup import WorkerGroup

from .algorithms import AdaptiveKLController, FixedKLController, KLController
from .batch_sizes import batch_sizes, update_plans
from .checkpoint import BestCheckpoint, CheckpointStore
from .choices import advantage_options, estimator_reads, policy_loss_options
from .config import Config, KLControlConfig, SamplingConfig
from .hooks import Hook, Hooks, RunSummary
from .length_penalties import LengthPenalties
from .objectives import PolicyObjective, ValueObjective
from .prepare import Prepared, prepare
from .resume import Resume, find_resume
from .reward_model import RewardModel
from .roles import worker_groups
from .run_checkpoint import POLICY, RunCheckpoints, check_tokenizer
from .run_lock import lock_run_folder
from .sampler import Sampling
from .scoring import Scorer
from .served_rollout import ServedRollout
from .stages import Stages
from .state_files import CheckpointError
from .steps import Step, group_step, ppo_step, remax_step
from .trainer import Trainer

__all__ = ["Prepared", "build_stages", "prepare", "step_of", "train"]

_logger = logging.getLogger(__name__)


def train(
    prepared: Prepared, folder: str | Path, *, hooks: Sequence[Hook] = (), resume: Resume | None = None
) -> RunSummary:
    """Start the workers, train, save the model into ``folder/model`` and end the workers, whatever happens.

    ``resume`` says where to begin; None for what ``trainer.resume_mode`` finds. Raises `RunFolderInUseError` where
    another process trains in the folder.
    """
    folder = Path(folder).absolute()  # workers may have another working directory
    with lock_run_folder(folder):
        return _train(prepared, folder, hooks, resume or find_resume(prepared.config, folder))


def _train(prepared: Prepared, folder: Path, hooks: Sequence[Hook], resume: Resume) -> RunSummary:
    trainer_config, rollout = prepared.config.trainer, prepared.config.actor_rollout_ref.rollout
    if resume.checkpoint is not None:
        check_tokenizer(resume.checkpoint, prepared.tokenizer)
    with worker_groups(prepared) as groups:
        policy = groups["actor_rollout_ref"]
        store, checkpoints = _checkpoints(prepared, groups, folder)
        trainer = Trainer(
            step_of(prepared.config),
            build_stages(prepared, groups, folder),
            prepared.train,
            prepared.loader,
            total_steps=prepared.total_steps,
            val=prepared.val,
            val_sampling=_sampling(rollout.val_kwargs, rollout.stop),
            val_samples=rollout.val_kwargs.n,
            val_batch_size=prepared.config.data.val_batch_size,
            val_before_train=trainer_config.val_before_train,
            test_freq=trainer_config.test_freq,
            save=checkpoints.save,
            save_freq=trainer_config.save_freq,
            hooks=hooks,
            strict_hooks=trainer_config.strict_hooks,
            num_workers=policy.world_size,
        )
        if resume.checkpoint is not None:
            state = checkpoints.load(resume.checkpoint)
            try:
                trainer.continue_from(state)
            except ValueError as error:
                raise CheckpointError(resume.checkpoint, str(error)) from error
        elif resume.begin_again:
            Hooks(hooks, strict=trainer_config.strict_hooks).call("on_rewind", 0)
        for place in store.continue_from(resume.step):
            _logger.warning("a checkpoint of a later step is set aside: %s", place)
        summary = trainer.fit()
        policy.save_model(str(folder / "model"))
        prepared.tokenizer.save_pretrained(folder / "model")
    return summary


def step_of(config: Config) -> Step:
    """The step function of the run."""
    if config.use_critic:
        return ppo_step
    return remax_step if estimator_reads(config, "reward_baselines") else group_step


def _checkpoints(
    prepared: Prepared, groups: Mapping[str, WorkerGroup], folder: str | Path
) -> tuple[CheckpointStore, RunCheckpoints]:
    config = prepared.config.trainer
    best = BestCheckpoint(metric=config.keep_best, mode=config.keep_best_mode) if config.keep_best else None
    store = CheckpointStore(folder, keep=config.max_ckpt_to_keep, best=best)
    roles = {POLICY: groups["actor_rollout_ref"]} | {name: groups[name] for name in ("critic",) if name in groups}
    return store, RunCheckpoints(store, roles, prepared.tokenizer, config=prepared.config, best=best)


def _sampling(config: SamplingConfig, stop: Sequence[str]) -> Sampling:
    return Sampling(
        temperature=config.temperature or 1.0,  # 0 is allowed where nothing is drawn
        top_k=config.top_k,
        top_p=config.top_p,
        do_sample=config.do_sample,
        stop=tuple(stop),
    )


def _kl_controller(config: KLControlConfig) -> KLController:
    if config.type == "fixed":
        return FixedKLController(config.kl_coef)
    return AdaptiveKLController(config.kl_coef, target=config.target_kl, horizon=config.horizon)


def _served_rollout(config: Config, groups: Mapping[str, WorkerGroup], folder: str | Path) -> ServedRollout | None:
    if "rollout" not in groups:
        return None
    reload = config.actor_rollout_ref.rollout.server.reload_path is not None
    weights = Path(folder) / "rollout_weights"
    return ServedRollout(groups["actor_rollout_ref"], groups["rollout"], weights, reload=reload)


def _scorer(prepared: Prepared, groups: Mapping[str, WorkerGroup]) -> Scorer:
    if "reward_model" not in groups:
        return prepared.scorer
    by_text = prepared.config.reward.reward_model.use_own_tokenizer
    return replace(prepared.scorer, reward_model=RewardModel(groups["reward_model"], by_text=by_text))


def _length_penalties(prepared: Prepared) -> LengthPenalties | None:
    reward = prepared.config.reward
    buffer = reward.overlong_buffer
    if not buffer.enable and reward.missing_eos_penalty is None:
        return None
    return LengthPenalties(
        max_length=prepared.config.data.max_response_length,
        overlong_buffer=buffer.len if buffer.enable else None,
        overlong_factor=buffer.penalty_factor,
        missing_eos=reward.missing_eos_penalty,
        eos_token_ids=prepared.eos_token_ids,
    )


def build_stages(prepared: Prepared, groups: Mapping[str, WorkerGroup], folder: str | Path) -> Stages:
    """The stages of the run over its groups; ``folder`` takes the weights for a rollout server."""
    config = prepared.config
    algorithm, actor, rollout = config.algorithm, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    length, sizes, plans = config.data.max_response_length, batch_sizes(config), update_plans(config)
    if config.trainer.data_plane == "reference":
        groups = {name: group.by_reference() for name, group in groups.items()}
    return Stages(
        policy=groups["actor_rollout_ref"],
        critic=groups.get("critic"),
        rollout=_served_rollout(config, groups, folder),
        scorer=_scorer(prepared, groups),
        samples_per_prompt=rollout.n,
        sampling=_sampling(rollout, rollout.stop),
        max_response_length=length,
        adv_estimator=algorithm.adv_estimator,
        adv_options=advantage_options(config, [term.weight for term in prepared.scorer.reward.terms]),
        with_sum_pi_squared=estimator_reads(config, "sum_pi_squared"),
        correction=algorithm.rollout_correction,
        policy_objective=PolicyObjective(
            loss_mode=actor.policy_loss.loss_mode,
            options=policy_loss_options(config),
            loss_agg_mode=actor.loss_agg_mode,
            temperature=rollout.temperature,
            entropy_coeff=actor.entropy_coeff,
            kl_coef=actor.kl_loss_coef if actor.use_kl_loss else None,
            kl_kind=actor.kl_loss_type,
            max_response_length=length,
        ),
        policy_plan=plans.actor,
        value_objective=ValueObjective(
            cliprange_value=config.critic.cliprange_value,
            loss_agg_mode=config.critic.loss_agg_mode or actor.loss_agg_mode,
            max_response_length=length,
        ),
        value_plan=plans.critic,
        use_reference=config.use_reference,
        length_penalties=_length_penalties(prepared),
        kl_in_reward=_kl_controller(algorithm.kl_ctrl) if algorithm.use_kl_in_reward else None,
        kl_penalty=algorithm.kl_penalty,
        log_prob_micro_batches=sizes.log_prob,
        ref_micro_batches=sizes.ref,
        value_micro_batches=sizes.values,
        balance_batch=config.trainer.balance_batch,
        critic_warmup=config.actor_warmup,
        seed=config.trainer.seed,
    )
