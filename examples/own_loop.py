"""Write your own loop: GRPO in twenty lines, from the trainer's pieces, without its command line or configuration.

And again one step off: workers of their own sample the next responses while the policy learns from the last ones.
"""

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from kapell.protocol import DataProto
from kapell.trainer.config import OptimConfig, RolloutCorrectionConfig
from kapell.trainer.data import PromptDataset, PromptLoader
from kapell.trainer.metrics import metrics_of
from kapell.trainer.models import build_policy, new_model_config
from kapell.trainer.objectives import PolicyObjective
from kapell.trainer.reward_functions import FunctionReward
from kapell.trainer.reward_sum import RewardSum, RewardTerm
from kapell.trainer.rows import PromptRow
from kapell.trainer.sampler import Sampling
from kapell.trainer.scoring import Scorer
from kapell.trainer.stages import Stages
from kapell.trainer.tasks.reverse_digits import score
from kapell.trainer.tokenizer import build_character_tokenizer
from kapell.trainer.updates import UpdatePlan
from kapell.trainer.workers import ActorRolloutRefWorker
from kapell.workergroup import ClassWithInitArgs, load_backend

# The task: reverse two digits.
TOKENIZER = build_character_tokenizer("0123456789")
PROMPTS = PromptDataset(
    [PromptRow(f"{n:02d}", f"{n:02d}"[::-1], "two digits") for n in range(100)], TOKENIZER, max_prompt_length=4
)
POLICY = ClassWithInitArgs(
    ActorRolloutRefWorker,
    partial(build_policy, new_model_config(TOKENIZER, max_length=16), seed=1),
    OptimConfig(lr=3e-3),
    eos_token_ids=[TOKENIZER.eos_token_id],
    pad_token_id=TOKENIZER.pad_token_id,
)
STAGES = partial(
    Stages,
    scorer=Scorer(reward=RewardSum([RewardTerm("digits", FunctionReward(function=score))]), tokenizer=TOKENIZER),
    samples_per_prompt=8,
    sampling=Sampling(temperature=1.0),
    max_response_length=3,
    adv_estimator="grpo",
    policy_objective=PolicyObjective(options={"clip_ratio": 0.2}),
)


def main(backend_name: str, steps: int = 40) -> list[float]:
    """Teach a new model on two workers, on "ray" or "local"; the mean reward of each step."""
    loader = PromptLoader(len(PROMPTS), batch_size=32, shuffle=True, seed=1)
    rewards = []
    with load_backend(backend_name)() as backend:
        policy = backend.worker_group(backend.resource_pool([2]), POLICY, role="policy")
        stages = STAGES(policy=policy, policy_plan=UpdatePlan(prompts_per_mini_batch=8))
        for step in range(1, steps + 1):
            batch = stages.generate(PROMPTS.batch(loader.next_batch()), step)
            batch = stages.score(batch)
            batch = stages.old_log_probs(batch)
            batch = stages.shape_rewards(batch)
            batch = stages.advantages(batch)
            batch = stages.update_actor(batch, step)
            rewards.append(_reward(batch))
            print(f"step {step}: reward {rewards[-1]:.3f}, loss {metrics_of(batch)['actor/pg_loss'].value:.4f}")
    return rewards


def one_step_off(backend_name: str, steps: int = 40, *, max_staleness: int = 1) -> list[tuple[float, float]]:
    """The same with a worker that learns and one that samples; of each step its reward, and the updates it is behind.

    With ``max_staleness=0`` the sampler waits for each update.
    """
    loader = PromptLoader(len(PROMPTS), batch_size=32, shuffle=True, seed=1)
    seen = []
    with load_backend(backend_name)() as backend, ThreadPoolExecutor(1) as sampling:
        policy = backend.worker_group(backend.resource_pool([1]), POLICY, role="policy")
        rollout = backend.worker_group(backend.resource_pool([1]), POLICY, role="rollout")
        stages = STAGES(
            policy=policy,
            rollout=rollout,
            correction=RolloutCorrectionConfig(rollout_is="token"),  # for the policy that sampled is another one
            policy_plan=UpdatePlan(prompts_per_mini_batch=32),
        )

        def begin(step: int) -> Future[DataProto]:
            weights = policy.weights.options(blocking=False)()  # not fetched here: they go from worker to worker
            rollout.load_weights(weights, policy_version=policy.policy_version())
            return sampling.submit(stages.generate, PROMPTS.batch(loader.next_batch()), step)

        pending = begin(1)
        for step in range(1, steps + 1):
            batch = pending.result()
            if max_staleness:
                pending = begin(step + 1)
            batch = stages.score(batch)
            batch = stages.old_log_probs(batch)
            batch = stages.correct_rollout(batch)
            batch = stages.shape_rewards(batch)
            batch = stages.advantages(batch)
            batch = stages.update_actor(batch, step)
            if not max_staleness:
                pending = begin(step + 1)
            seen.append((_reward(batch), metrics_of(batch)["rollout_corr/staleness/max"].value))
            print(f"step {step}: reward {seen[-1][0]:.3f}, sampled {seen[-1][1]:g} updates ago")
    return seen


def _reward(batch: DataProto) -> float:
    return float(batch.column("rm_scores").sum(-1).mean())


if __name__ == "__main__":
    loop = one_step_off if "one_step_off" in sys.argv else main
    loop("ray" if "ray" in sys.argv else "local")
