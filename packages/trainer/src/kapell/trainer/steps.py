"""One training step of each family of algorithms, to be read beside the paper and copied for a new one."""

from __future__ import annotations

from collections.abc import Callable

from kapell.protocol import DataProto

from .stages import Stages

__all__ = ["Step", "group_step", "ppo_step", "remax_step"]

Step = Callable[[Stages, DataProto, int], DataProto]
"""From the stages, a batch of prompts and the step's number to the finished batch."""


def group_step(stages: Stages, prompts: DataProto, step: int) -> DataProto:
    """GRPO and its relatives: a response is compared with the others to the same prompt (2402.03300, algorithm 1)."""
    batch = stages.generate(prompts, step)
    batch = stages.score(batch)
    batch = stages.old_log_probs(batch)
    batch = stages.correct_rollout(batch)
    if stages.use_reference:
        batch = stages.ref_log_probs(batch)
    batch = stages.shape_rewards(batch)
    batch = stages.advantages(batch)
    return stages.update_actor(batch, step)


def remax_step(stages: Stages, prompts: DataProto, step: int) -> DataProto:
    """ReMax: a response is compared with the greedy one to its prompt (2310.10505, algorithm 1)."""
    batch = stages.generate(prompts, step)
    batch = stages.score(batch)
    batch = stages.greedy_baselines(batch, prompts, step)
    batch = stages.old_log_probs(batch)
    batch = stages.correct_rollout(batch)
    if stages.use_reference:
        batch = stages.ref_log_probs(batch)
    batch = stages.shape_rewards(batch)
    batch = stages.advantages(batch)
    return stages.update_actor(batch, step)


def ppo_step(stages: Stages, prompts: DataProto, step: int) -> DataProto:
    """PPO: a critic tells each token's share of the reward (1707.06347, algorithm 1)."""
    batch = stages.generate(prompts, step)
    batch = stages.score(batch)
    batch = stages.old_log_probs(batch)
    batch = stages.correct_rollout(batch)
    if stages.use_reference:
        batch = stages.ref_log_probs(batch)
    batch = stages.values(batch)
    batch = stages.shape_rewards(batch)
    batch = stages.advantages(batch)
    batch = stages.update_critic(batch, step)
    return stages.update_actor(batch, step)
