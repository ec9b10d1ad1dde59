"""Starts the workers of a prepared run and trains."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kapell.workergroup import ClassWithInitArgs, WorkerGroup, colocate, load_backend

from .algorithms import AdaptiveKLController, FixedKLController, KLController, NormScope
from .batch_sizes import batch_sizes
from .checkpoint import BestCheckpoint, CheckpointStore
from .choices import advantage_options, estimator_reads, policy_loss_options
from .config import (
    ActorConfig,
    Config,
    CriticConfig,
    CriticModelConfig,
    KLControlConfig,
    ModelConfig,
    SamplingConfig,
    TrainerConfig,
)
from .hooks import Hook, Hooks, RunSummary
from .micro_batches import MicroBatches
from .objectives import PolicyObjective, ValueObjective
from .openai_engine import OpenAIEngine
from .placement import start_group
from .prepare import Prepared, prepare
from .resume import Resume, find_resume
from .reward_model import RewardModel, RewardModelWorker, build_reward_model
from .run_checkpoint import POLICY, RunCheckpoints, check_tokenizer
from .run_lock import lock_run_folder
from .sampler import Sampling
from .scoring import Scorer
from .served_rollout import RolloutServerWorker, ServedRollout
from .stages import Stages
from .state_files import CheckpointError
from .steps import Step, group_step, ppo_step, remax_step
from .tokenizer import load_tokenizer
from .trainer import Trainer
from .updates import UpdatePlan
from .workers import ActorRolloutRefWorker, CriticWorker

__all__ = ["Prepared", "build_stages", "prepare", "step_of", "train", "worker_groups"]

_logger = logging.getLogger(__name__)


def train(
    prepared: Prepared, folder: str | Path, *, hooks: Sequence[Hook] = (), resume: Resume | None = None
) -> RunSummary:
    """Start the workers, train, save the model into ``folder/model`` and end the workers, whatever happens.

    ``resume`` says where to begin; None for what ``trainer.resume_mode`` finds. Raises `RunFolderInUseError` where
    another process trains in the folder.
    """
    with lock_run_folder(folder):
        return _train(prepared, folder, hooks, resume or find_resume(prepared.config, folder))


def _train(prepared: Prepared, folder: str | Path, hooks: Sequence[Hook], resume: Resume) -> RunSummary:
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
        policy.save_model(str(Path(folder) / "model"))
        prepared.tokenizer.save_pretrained(Path(folder) / "model")
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


@contextmanager
def worker_groups(
    prepared: Prepared, *, substitutes: Mapping[str, ClassWithInitArgs] | None = None
) -> Generator[Mapping[str, WorkerGroup]]:
    """The roles of the run, all in the same processes but for a reward model with its own; they end with the block.

    ``substitutes`` are workers to use for a role in place of the run's own.
    """
    config, tokenizer = prepared.config, prepared.tokenizer
    actor, sizes = config.actor_rollout_ref.actor, batch_sizes(config)
    policy = ClassWithInitArgs(
        ActorRolloutRefWorker,
        prepared.build_policy,
        actor.optim,
        eos_token_ids=_eos_token_ids(prepared),
        pad_token_id=tokenizer.pad_token_id,
        tokenizer=tokenizer if config.actor_rollout_ref.rollout.stop else None,
        max_num_seqs=config.actor_rollout_ref.rollout.max_num_seqs,
        with_reference=config.use_reference,
        build_reference=prepared.build_reference,
        total_steps=_optimizer_steps(prepared, _plan(actor, actor, sizes.actor)),
        **_worker_options(config.trainer),
        seed=config.trainer.seed,
        **_engine_options(actor, config.actor_rollout_ref.model),
    )
    roles = {"actor_rollout_ref": policy}
    if config.use_critic:
        roles["critic"] = ClassWithInitArgs(
            CriticWorker,
            prepared.build_critic,
            config.critic.optim,
            total_steps=_optimizer_steps(prepared, _plan(config.critic, actor, sizes.critic)),
            **_worker_options(config.trainer),
            seed=config.trainer.seed + 1,
            **_engine_options(config.critic, config.critic.model),
        )
    if config.actor_rollout_ref.rollout.name == "openai":
        roles["rollout"] = ClassWithInitArgs(RolloutServerWorker, _openai_engine(prepared))
    apart: dict[str, ClassWithInitArgs] = {}
    if (model := config.reward.reward_model).enable:
        (apart if model.enable_resource_pool else roles)["reward_model"] = _reward_model(prepared)
    roles |= {name: worker for name, worker in (substitutes or {}).items() if name in roles}
    with load_backend(config.backend.name)(**config.backend.options) as backend:
        start = partial(start_group, backend, trainer=config.trainer)
        groups = dict(start(colocate(roles), role="workers", size=config.trainer).spawn(roles))
        for name, worker in apart.items():
            groups[name] = start(worker, role=name, size=model)
        yield groups


def _worker_options(trainer: TrainerConfig) -> dict[str, Any]:
    return {"device": trainer.device, "torch_threads": trainer.torch_threads}


def _reward_model(prepared: Prepared) -> ClassWithInitArgs:
    model = prepared.config.reward.reward_model
    own = load_tokenizer(str(model.path)) if model.use_own_tokenizer else None
    pad_token_id = None if own else prepared.tokenizer.pad_token_id
    return ClassWithInitArgs(
        RewardModelWorker,
        partial(build_reward_model, str(model.path), pad_token_id=pad_token_id),
        own,
        micro_batch_size=model.micro_batch_size_per_gpu,
        **_worker_options(prepared.config.trainer),
    )


def _openai_engine(prepared: Prepared) -> OpenAIEngine:
    return OpenAIEngine(
        **vars(prepared.config.actor_rollout_ref.rollout.server),
        eos_token_ids=_eos_token_ids(prepared),
        pad_token_id=prepared.tokenizer.pad_token_id,
    )


def _eos_token_ids(prepared: Prepared) -> tuple[int, ...]:
    return (prepared.tokenizer.eos_token_id,)


def _engine_options(role: ActorConfig | CriticConfig, model: ModelConfig | CriticModelConfig) -> dict[str, Any]:
    return {
        "grad_clip": role.grad_clip,
        "strategy": role.strategy,
        "dtype": getattr(torch, model.dtype),
        "gradient_checkpointing": model.enable_gradient_checkpointing,
    }


def _plan(role: ActorConfig | CriticConfig, actor: ActorConfig, micro_batches: MicroBatches) -> UpdatePlan:
    return UpdatePlan(
        epochs=role.ppo_epochs,
        prompts_per_mini_batch=role.ppo_mini_batch_size or actor.ppo_mini_batch_size,
        micro_batches=micro_batches,
        shuffle=role.shuffle,
    )


def _optimizer_steps(prepared: Prepared, plan: UpdatePlan) -> int:
    per_epoch = -(-prepared.config.data.train_batch_size // plan.prompts_per_mini_batch)
    return prepared.total_steps * plan.epochs * per_epoch


def _sampling(config: SamplingConfig, stop: Sequence[str]) -> Sampling:
    return Sampling(
        temperature=config.temperature,
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


def build_stages(prepared: Prepared, groups: Mapping[str, WorkerGroup], folder: str | Path) -> Stages:
    """The stages of the run over its groups; ``folder`` takes the weights for a rollout server."""
    config = prepared.config
    algorithm, actor, rollout = config.algorithm, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    length, sizes = config.data.max_response_length, batch_sizes(config)
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
        policy_plan=replace(
            _plan(actor, actor, sizes.actor),
            balance=config.trainer.balance_batch,
            whiten_advantages=algorithm.norm_scope == NormScope.MINI_BATCH,
        ),
        value_objective=ValueObjective(
            cliprange_value=config.critic.cliprange_value,
            loss_agg_mode=config.critic.loss_agg_mode,
            max_response_length=length,
        ),
        value_plan=replace(_plan(config.critic, actor, sizes.critic), balance=config.trainer.balance_batch),
        use_reference=config.use_reference,
        kl_in_reward=_kl_controller(algorithm.kl_ctrl) if algorithm.use_kl_in_reward else None,
        kl_penalty=algorithm.kl_penalty,
        log_prob_micro_batches=sizes.log_prob,
        ref_micro_batches=sizes.ref,
        value_micro_batches=sizes.values,
        balance_batch=config.trainer.balance_batch,
        critic_warmup=config.trainer.critic_warmup,
        seed=config.trainer.seed,
    )
