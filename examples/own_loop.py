"""Write your own loop: GRPO in twenty lines, from the trainer's pieces, without its command line or configuration."""

import sys
from functools import partial

from kapell.trainer.config import OptimConfig
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


def main(backend_name: str, steps: int = 40) -> list[float]:
    """Teach a new model to reverse two digits on two workers, on "ray" or "local"; the mean reward of each step."""
    tokenizer = build_character_tokenizer("0123456789")
    rows = [PromptRow(f"{n:02d}", f"{n:02d}"[::-1], "two digits") for n in range(100)]
    prompts = PromptDataset(rows, tokenizer, max_prompt_length=4)
    loader = PromptLoader(len(prompts), batch_size=32, shuffle=True, seed=1)
    policy = ClassWithInitArgs(
        ActorRolloutRefWorker,
        partial(build_policy, new_model_config(tokenizer, max_length=16), seed=1),
        OptimConfig(lr=3e-3),
        eos_token_ids=[tokenizer.eos_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    rewards = []
    with load_backend(backend_name)() as backend:
        stages = Stages(
            policy=backend.worker_group(backend.resource_pool([2]), policy, role="policy"),
            scorer=Scorer(
                reward=RewardSum([RewardTerm("digits", FunctionReward(function=score))]), tokenizer=tokenizer
            ),
            samples_per_prompt=8,
            sampling=Sampling(temperature=1.0),
            max_response_length=3,
            adv_estimator="grpo",
            policy_objective=PolicyObjective(options={"clip_ratio": 0.2}),
            policy_plan=UpdatePlan(prompts_per_mini_batch=8),
        )
        for step in range(1, steps + 1):
            batch = stages.generate(prompts.batch(loader.next_batch()), step)
            batch = stages.score(batch)
            batch = stages.old_log_probs(batch)
            batch = stages.shape_rewards(batch)
            batch = stages.advantages(batch)
            batch = stages.update_actor(batch, step)
            rewards.append(float(batch.column("rm_scores").sum(-1).mean()))
            print(f"step {step}: reward {rewards[-1]:.3f}, loss {metrics_of(batch)['actor/pg_loss'].value:.4f}")
    return rewards


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["local"])
