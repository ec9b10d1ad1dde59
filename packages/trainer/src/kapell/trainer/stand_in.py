"""A run in small with the same algorithm, roles and columns: a tiny model, three prompts, one worker, one step.

It loads nothing that the configuration names, so that `kapell explain` takes seconds for any model, and `kapell plan`
has roles and columns to show where files are not there.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2ForSequenceClassification

from kapell.workergroup import ClassWithInitArgs

from .build import build_stages, prepare, step_of
from .config import (
    BackendConfig,
    Config,
    CriticModelConfig,
    DataConfig,
    ModelConfig,
    RefModelConfig,
    RewardConfig,
    RewardModelConfig,
    TrainerConfig,
)
from .observe import Observer
from .roles import worker_groups
from .rollout_engine import RolloutRequest
from .sampler import Rollout
from .served_rollout import RolloutServerWorker
from .steps import Step
from .tasks import reverse_digits
from .tokenizer import build_character_tokenizer

__all__ = ["StandInRun", "observe_stand_in"]

_MAX_TOKENS = 64  # per micro-batch; the run's own may be for shorter rows than these
_PROMPTS = 3
_LENGTH = 4  # of responses
_MODEL = ModelConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)


@dataclass(frozen=True)
class StandInRun:
    """What the run in small showed."""

    step: Step
    """The step function."""
    roles: dict[str, str]
    """The worker class of each role that was created."""
    observer: Observer
    """Its step."""


def observe_stand_in(config: Config) -> StandInRun:
    """Run one step of the configuration in small and say what it did."""
    with tempfile.TemporaryDirectory() as name, torch.random.fork_rng():
        folder = Path(name)
        prepared = prepare(_small(config, folder), folder)
        substitutes = {"rollout": ClassWithInitArgs(RolloutServerWorker, _NoServer())}
        observer, step = Observer(), step_of(prepared.config)
        with worker_groups(prepared, substitutes=substitutes) as groups:
            stages = build_stages(prepared, observer.groups(groups), folder)
            observer.run(step, stages, prepared.train.batch(range(_PROMPTS)))
            roles = {role: group.worker_class.__name__ for role, group in groups.items()}
    return StandInRun(step, roles, observer)


class _NoServer:
    """Answers in place of a rollout server."""

    def generate(self, request: RolloutRequest) -> Rollout:
        shape = (len(request.prompts), request.max_new_tokens)
        return Rollout(
            responses=torch.full(shape, 5), response_mask=torch.ones(shape).long(), rollout_log_probs=torch.zeros(shape)
        )

    def load_weights(self, folder: str) -> None:
        """There is nothing to load."""


def _small(config: Config, folder: Path) -> Config:
    policy = config.actor_rollout_ref
    actor = replace(policy.actor, ppo_epochs=1, ppo_mini_batch_size=_PROMPTS, ppo_micro_batch_size_per_gpu=None)
    actor = replace(actor, strategy="ddp", ppo_max_token_len_per_gpu=_MAX_TOKENS)  # its workers share this process
    return replace(
        config,
        data=DataConfig(
            train_files=[str(_write_prompts(folder))], train_batch_size=_PROMPTS, max_response_length=_LENGTH
        ),
        actor_rollout_ref=replace(
            policy,
            model=replace(_MODEL, lora_rank=min(policy.model.lora_rank, 1)),
            ref=replace(policy.ref, model=RefModelConfig(), log_prob_max_token_len_per_gpu=None),
            actor=actor,
            rollout=replace(policy.rollout, n=min(policy.rollout.n, 2), log_prob_max_token_len_per_gpu=None),
        ),
        critic=replace(
            config.critic,
            model=CriticModelConfig(lora_rank=min(config.critic.model.lora_rank, 1)),
            ppo_epochs=1,
            ppo_mini_batch_size=None,
            ppo_max_token_len_per_gpu=None,
            forward_max_token_len_per_gpu=None,
            strategy="ddp",
        ),
        reward=RewardConfig(
            terms=_small_terms(config),
            reward_model=_small_reward_model(config, folder),
            overlong_buffer=replace(config.reward.overlong_buffer, len=min(config.reward.overlong_buffer.len, _LENGTH)),
            missing_eos_penalty=config.reward.missing_eos_penalty,
        ),
        trainer=TrainerConfig(n_gpus_per_node=1, total_training_steps=1, logger=[]),
        backend=BackendConfig(name="local"),
    )


def _write_prompts(folder: Path) -> Path:
    rows, _ = reverse_digits.make_rows(seed=1)
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:_PROMPTS]))
    return path


def _small_terms(config: Config) -> dict[str, Any]:
    """The bundled task's reward for each of the run's own, whose number an algorithm may be told."""
    names = [*config.reward.terms, *(["reward"] if config.reward.custom_reward_function.path is not None else [])]
    return {name: {"type": "function"} for name in names}


def _small_reward_model(config: Config, folder: Path) -> RewardModelConfig:
    model = config.reward.reward_model
    if not model.enable:
        return model
    tokenizer = build_character_tokenizer("0123456789")
    tokenizer.save_pretrained(folder / "reward_model")
    sizes = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=8, n_layer=1, n_head=1)
    sizes.bos_token_id = sizes.eos_token_id = None
    sizes.pad_token_id = tokenizer.pad_token_id
    sizes.num_labels = 1
    GPT2ForSequenceClassification(sizes).save_pretrained(folder / "reward_model")
    return replace(model, path=str(folder / "reward_model"), micro_batch_size_per_gpu=None, nnodes=1, n_gpus_per_node=1)
