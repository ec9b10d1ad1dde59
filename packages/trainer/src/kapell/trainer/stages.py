"""The stages of a step: each reads columns of the batch, makes new ones on workers or by a pure function, and is timed.

A step (`kapell.trainer.steps`) is a sequence of them; they hold no state but the KL controller's weight. Over groups
that give batches by reference (`WorkerGroup.by_reference`) a step's batch is a `StoredBatch`, which does what a
`DataProto` does.
"""

# B rows (prompts times samples), T response tokens

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kapell.protocol import DataProto
from kapell.workergroup import WorkerGroup

from .algorithms import (
    KLController,
    Metric,
    columns_of,
    compute_advantages,
    correct_rollout,
    get_advantage_estimator,
    kl_penalized_rewards,
)
from .balance import balanced_call
from .config import RolloutCorrectionConfig
from .length_penalties import LengthPenalties
from .metrics import add_metrics, metrics_of, spread
from .micro_batches import MicroBatches
from .objectives import PolicyObjective, ValueObjective
from .sampler import Sampling
from .scoring import Scorer
from .served_rollout import ServedRollout
from .stage import stage
from .updates import UpdatePlan, learn

__all__ = ["Stages"]

_MODEL_COLUMNS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")


@dataclass(kw_only=True)
class Stages:
    """The stages over their worker groups. ``critic`` and reference stages exist only where a step uses them."""

    policy: WorkerGroup
    """Workers with the methods of `kapell.trainer.workers.ActorRolloutRefWorker`."""
    critic: WorkerGroup | None = None
    """Workers with the methods of `kapell.trainer.workers.CriticWorker`."""
    rollout: WorkerGroup | ServedRollout | None = None
    """What samples, by its method ``generate_sequences``; None for the policy's own workers."""
    scorer: Scorer
    """Turns responses into scores."""
    samples_per_prompt: int
    """Responses per prompt."""
    sampling: Sampling
    """How they are sampled."""
    max_response_length: int
    """Longest response in tokens."""
    adv_estimator: str
    """Name or import path of the advantage estimator."""
    adv_options: Mapping[str, Any] = field(default_factory=dict)
    """Its options, such as ``gamma``."""
    with_sum_pi_squared: bool = False
    """Whether the estimator reads ``sum_pi_squared``, which the pass for the old log-probabilities then makes."""
    correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """What is done about the gap between the sampler and the policy that is trained."""
    policy_objective: PolicyObjective
    """What the actor's update minimises."""
    policy_plan: UpdatePlan
    """In what portions."""
    value_objective: ValueObjective = field(default_factory=ValueObjective)
    """What the critic's update minimises."""
    value_plan: UpdatePlan | None = None
    """In what portions."""
    use_reference: bool = False
    """Whether steps need the reference's log-probabilities."""
    length_penalties: LengthPenalties | None = None
    """What training's rewards lose for the length of a response; None for nothing."""
    kl_in_reward: KLController | None = None
    """The weight of the KL penalty in the reward; None for no penalty."""
    kl_penalty: str = "kl"
    """Its estimator."""
    log_prob_micro_batches: MicroBatches = field(default_factory=MicroBatches)
    """What goes through the policy at once for log-probabilities, on each worker."""
    ref_micro_batches: MicroBatches = field(default_factory=MicroBatches)
    """The same for those of the reference."""
    value_micro_batches: MicroBatches = field(default_factory=MicroBatches)
    """What goes through the critic at once for values, on each worker."""
    balance_batch: bool = True
    """Whether workers get rows with as many tokens in all as the others when these are evaluated."""
    critic_warmup: int = 0
    """First steps in which the actor does not learn."""
    seed: int = 1
    """Seed of sampling and of the order of mini-batches."""

    def __post_init__(self) -> None:
        self._first_beta = None if self.kl_in_reward is None else self.kl_in_reward.beta

    @stage(
        "gen",
        reads=("prompts", "prompt_mask", "index"),
        writes=("sample_id", "responses", "rollout_log_probs", "policy_version", *_MODEL_COLUMNS),
    )
    def generate(self, prompts: DataProto, step: int) -> DataProto:
        """Sample responses: each prompt becomes ``samples_per_prompt`` rows."""
        return self.sample(prompts, self.sampling, self.samples_per_prompt, step)

    def sample(self, prompts: DataProto, sampling: Sampling, num_samples: int, step: int) -> DataProto:
        """Responses to prompts, ``num_samples`` rows each, without a stage's bookkeeping."""
        batch = prompts.repeat(num_samples, interleave=True) if num_samples > 1 else prompts
        # From the prompt's place in its file, so that neither batching nor workers change what is sampled for it.
        sample_id = batch.column("index") * num_samples + torch.arange(len(batch)) % num_samples
        batch = batch.union(DataProto.from_dict(tensors={"sample_id": sample_id}))
        sampler = self.policy if self.rollout is None else self.rollout
        rollout = sampler.generate_sequences(
            batch, sampling=sampling, max_new_tokens=self.max_response_length, seed=self.seed, step=step
        )
        return batch.union(rollout)

    @stage(
        "reward",
        reads=("responses", "response_mask", "data_source", "ground_truth", "extra_info"),
        writes=("rm_scores", "exact_match", "reward_components", "solution_str", "reward_extra"),
    )
    def score(self, batch: DataProto) -> DataProto:
        """Score each response."""
        return self.scorer(batch)

    @stage("gen_max", reads=("uid",), writes=("reward_baselines",))
    def greedy_baselines(self, batch: DataProto, prompts: DataProto, step: int) -> DataProto:
        """The score of the greedy response to each row's prompt."""
        greedy = self.scorer(self.sample(prompts, replace(self.sampling, do_sample=False), 1, step))
        scores = dict(zip(greedy.non_tensor_batch["uid"], greedy.column("rm_scores").sum(-1).tolist(), strict=True))
        baselines_B = torch.tensor([scores[uid] for uid in batch.non_tensor_batch["uid"]])
        metrics = {"critic/reward_baselines/mean": Metric.mean(baselines_B.mean().item(), weight=len(batch))}
        metrics |= {name: value for name, value in metrics_of(greedy).items() if name == "reward/errors"}
        return add_metrics(batch.union(DataProto.from_dict(tensors={"reward_baselines": baselines_B})), metrics)

    def _columns_of_old_log_probs(self) -> tuple[str, ...]:
        return ("rollout_log_probs",) if self.correction.bypass_mode else _MODEL_COLUMNS

    @stage(
        "old_log_prob",
        reads=_columns_of_old_log_probs,
        writes=("old_log_probs", "entropys", "sum_pi_squared"),
    )
    def old_log_probs(self, batch: DataProto) -> DataProto:
        """Log-probabilities of the responses under the policy before its update; with bypass the sampler's own."""
        if self.correction.bypass_mode:
            return batch.union(batch.select(["rollout_log_probs"], [], []).rename("rollout_log_probs", "old_log_probs"))
        return batch.union(
            self._per_row(
                self.policy,
                self.policy.compute_log_prob,
                batch,
                temperature=self.sampling.temperature,
                with_sum_pi_squared=self.with_sum_pi_squared,
                micro_batches=self.log_prob_micro_batches,
            )
        )

    @stage(
        "rollout_corr",
        reads=("old_log_probs", "rollout_log_probs", "response_mask", "policy_version"),
        writes=("loss_mask", "rollout_is_weights"),
    )
    def correct_rollout(self, batch: DataProto) -> DataProto:
        """Importance weights and a loss mask, where they are asked for, and how far the sampler is from the policy.

        As ``rollout_corr/staleness`` also by how many optimizer steps: 0 but where sampling does not wait for updates.
        """
        columns = (batch.column(name) for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
        correction = correct_rollout(*columns, **vars(self.correction))
        made = {"loss_mask": correction.loss_mask} if self.correction.rollout_rs else {}
        if correction.rollout_is_weights is not None:
            made["rollout_is_weights"] = correction.rollout_is_weights
        missed_B = self.policy.policy_version() - batch.column("policy_version").float()
        metrics = correction.metrics | spread("rollout_corr/staleness", missed_B)
        return add_metrics(batch.union(DataProto.from_dict(tensors=made)) if made else batch, metrics)

    @stage("ref", reads=_MODEL_COLUMNS, writes=("ref_log_prob",))
    def ref_log_probs(self, batch: DataProto) -> DataProto:
        """Log-probabilities of the responses under the frozen reference."""
        return batch.union(
            self._per_row(
                self.policy,
                self.policy.compute_ref_log_prob,
                batch,
                temperature=self.sampling.temperature,
                micro_batches=self.ref_micro_batches,
            )
        )

    @stage("values", reads=_MODEL_COLUMNS, writes=("values",))
    def values(self, batch: DataProto) -> DataProto:
        """The critic's value before each token."""
        critic, _ = self._critic_and_plan()
        return batch.union(self._per_row(critic, critic.compute_values, batch, micro_batches=self.value_micro_batches))

    def _columns_of_rewards(self) -> tuple[str, ...]:
        divergence = ("old_log_probs", "ref_log_prob") if self.kl_in_reward is not None else ()
        length = ("responses",) if self.length_penalties is not None else ()
        return ("rm_scores", "response_mask", *length, *divergence)

    @stage("shape_rewards", reads=_columns_of_rewards, writes=("token_level_scores", "token_level_rewards"))
    def shape_rewards(self, batch: DataProto) -> DataProto:
        """Rewards per token: the scores, less the penalties for length and KL divergence where there are such."""
        scores_BT = batch.column("rm_scores")
        rewards_BT, metrics = scores_BT, {}
        if self.length_penalties is not None:
            penalties_BT, metrics = self.length_penalties(batch.column("responses"), batch.column("response_mask"))
            rewards_BT = scores_BT + penalties_BT
        if self.kl_in_reward is not None:
            coefficient = self.kl_in_reward.beta
            rewards_BT, current = kl_penalized_rewards(
                rewards_BT,
                batch.column("old_log_probs"),
                batch.column("ref_log_prob"),
                batch.column("response_mask"),
                beta=coefficient,
                kind=self.kl_penalty,
            )
            self.kl_in_reward.update(current=current, num_rows=len(batch))
            metrics |= {
                "actor/reward_kl_penalty": Metric.mean(current, weight=len(batch)),
                "actor/reward_kl_penalty_coeff": Metric.mean(coefficient, weight=1),
            }
        columns = {"token_level_scores": scores_BT, "token_level_rewards": rewards_BT}
        return add_metrics(batch.union(DataProto.from_dict(tensors=columns)), metrics)

    def _columns_of_advantages(self) -> tuple[str, ...]:
        needed = columns_of(get_advantage_estimator(self.adv_estimator))
        return tuple(name for name, required in needed.items() if required)

    @stage("adv", reads=_columns_of_advantages, writes=("advantages", "returns"))
    def advantages(self, batch: DataProto) -> DataProto:
        """Advantages and returns by the estimator."""
        read = {"response_mask", "token_level_rewards", *columns_of(get_advantage_estimator(self.adv_estimator))}
        columns = {name: batch.column(name) for name in batch.columns if name in read}
        result = compute_advantages(self.adv_estimator, columns, self.adv_options)
        made = DataProto.from_dict(tensors={"advantages": result.advantages, "returns": result.returns})
        return add_metrics(batch.union(made), result.metrics)

    @stage("update_critic", reads=lambda self: (*self.value_objective.columns, "uid"))
    def update_critic(self, batch: DataProto, step: int) -> DataProto:
        """Move the critic towards the returns."""
        critic, plan = self._critic_and_plan()
        return learn(critic, batch, self.value_objective, plan, role="critic", seed=(self.seed, step))

    @stage("update_actor", reads=lambda self: (*self.policy_objective.columns, "uid"))
    def update_actor(self, batch: DataProto, step: int) -> DataProto:
        """Move the policy along the advantages, once the critic has warmed up."""
        if step <= self.critic_warmup:
            return batch
        return learn(self.policy, batch, self.policy_objective, self.policy_plan, role="actor", seed=(self.seed, step))

    def state_dict(self) -> dict[str, Any]:
        """What stages keep between steps, for a checkpoint: the KL penalty's weight, and the one it began with."""
        controller = self.kl_in_reward
        return {} if controller is None else {"kl": {"first": self._first_beta, "beta": controller.beta}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; a weight that was since configured anew begins anew."""
        if self.kl_in_reward is not None and "kl" in state and state["kl"]["first"] == self._first_beta:
            self.kl_in_reward.beta = state["kl"]["beta"]

    def _per_row(
        self, group: WorkerGroup, method: Callable[..., DataProto], batch: DataProto, **options: Any
    ) -> DataProto:
        if not self.balance_batch:
            return method(batch, **options)
        return balanced_call(method, batch, num_workers=group.world_size, **options)

    def _critic_and_plan(self) -> tuple[WorkerGroup, UpdatePlan]:
        if self.critic is None or self.value_plan is None:
            raise ValueError(
                f"a stage of the critic was called with critic={self.critic!r} and value_plan={self.value_plan!r}; "
                "give Stages both, or use a step without a critic"
            )
        return self.critic, self.value_plan
