"""The roles of a run as workers: each started from its part of the configuration, in processes shared or of its own."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch

from kapell.workergroup import ClassWithInitArgs, WorkerGroup, colocate, load_backend

from .batch_sizes import update_plans
from .config import ActorConfig, CriticConfig, CriticModelConfig, ModelConfig, TrainerConfig
from .models import model_folder
from .openai_engine import OpenAIEngine
from .placement import start_group
from .prepare import Prepared
from .reward_model import RewardModelWorker, build_reward_model
from .served_rollout import RolloutServerWorker
from .tokenizer import load_tokenizer
from .updates import UpdatePlan
from .workers import ActorRolloutRefWorker, CriticWorker

__all__ = ["worker_groups"]


@contextmanager
def worker_groups(
    prepared: Prepared, *, substitutes: Mapping[str, ClassWithInitArgs] | None = None
) -> Generator[Mapping[str, WorkerGroup]]:
    """The roles of the run, all in the same processes but for a reward model with its own; they end with the block.

    ``substitutes`` are workers to use for a role in place of the run's own.
    """
    config, tokenizer = prepared.config, prepared.tokenizer
    actor, plans = config.actor_rollout_ref.actor, update_plans(config)
    policy = ClassWithInitArgs(
        ActorRolloutRefWorker,
        prepared.build_policy,
        actor.optim,
        eos_token_ids=prepared.eos_token_ids,
        pad_token_id=tokenizer.pad_token_id,
        tokenizer=tokenizer if config.actor_rollout_ref.rollout.stop else None,
        max_num_seqs=config.actor_rollout_ref.rollout.max_num_seqs,
        with_reference=config.use_reference,
        build_reference=prepared.build_reference,
        total_steps=_optimizer_steps(prepared, plans.actor, first=config.actor_warmup),
        **_worker_options(config.trainer),
        **_engine_options(actor, config.actor_rollout_ref.model),
    )
    roles = {"actor_rollout_ref": policy}
    if config.use_critic:
        roles["critic"] = ClassWithInitArgs(
            CriticWorker,
            prepared.build_critic,
            config.critic.optim,
            total_steps=_optimizer_steps(prepared, plans.critic),
            **_worker_options(config.trainer),
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
    folder = model_folder(str(model.path))
    own = load_tokenizer(folder) if model.use_own_tokenizer else None
    pad_token_id = None if own else prepared.tokenizer.pad_token_id
    return ClassWithInitArgs(
        RewardModelWorker,
        partial(build_reward_model, str(folder), pad_token_id=pad_token_id),
        own,
        micro_batch_size=model.micro_batch_size_per_gpu,
        **_worker_options(prepared.config.trainer),
    )


def _openai_engine(prepared: Prepared) -> OpenAIEngine:
    return OpenAIEngine(
        **vars(prepared.config.actor_rollout_ref.rollout.server),
        eos_token_ids=prepared.eos_token_ids,
        pad_token_id=prepared.tokenizer.pad_token_id,
    )


def _engine_options(role: ActorConfig | CriticConfig, model: ModelConfig | CriticModelConfig) -> dict[str, Any]:
    return {
        "grad_clip": role.grad_clip,
        "strategy": role.strategy,
        "dtype": getattr(torch, model.dtype),
        "gradient_checkpointing": model.enable_gradient_checkpointing,
    }


def _optimizer_steps(prepared: Prepared, plan: UpdatePlan, *, first: int = 0) -> int:
    """Those of the whole run, which a role spends from its step ``first`` on."""
    sizes = islice(prepared.loader.batch_sizes(), prepared.loader.steps_in(1))
    of_batch = [-(-size // plan.prompts_per_mini_batch) for size in sizes]  # of each batch of a pass over the prompts

    def until(step: int) -> int:
        passes, rest = divmod(step, len(of_batch))
        return passes * sum(of_batch) + sum(of_batch[:rest])

    return plan.epochs * max(0, until(prepared.total_steps) - until(first))
