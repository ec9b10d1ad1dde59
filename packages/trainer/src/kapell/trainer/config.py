"""The typed configuration of a run, in the groups and under the names that verl's users know.

Every key does something, and its value is checked where its group is built. `kapell.trainer.config_load` reads files
and command-line overrides into these classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from .config_algorithm import AlgorithmConfig, KLControlConfig, RolloutCorrectionConfig
from .config_checks import require_not_negative, require_positive
from .config_conditions import AllOf, AnyOf, Conditions, Given, Needs, Unset
from .config_models import (
    ActorConfig,
    ActorRolloutRefConfig,
    CriticConfig,
    CriticModelConfig,
    ModelConfig,
    PolicyLossConfig,
    RefConfig,
    RefModelConfig,
)
from .config_optim import OptimConfig
from .config_rollout import RolloutConfig, RolloutServerConfig, SamplingConfig
from .config_trainer import BackendConfig, TrainerConfig

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgorithmConfig",
    "BackendConfig",
    "Config",
    "CriticConfig",
    "CriticModelConfig",
    "CustomRewardConfig",
    "DataConfig",
    "KLControlConfig",
    "ModelConfig",
    "OptimConfig",
    "OverlongBufferConfig",
    "PolicyLossConfig",
    "RefConfig",
    "RefModelConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RolloutServerConfig",
    "SamplingConfig",
    "TrainerConfig",
]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where prompts come from and how they are batched."""

    train_files: list[str] = field(default_factory=list)
    """Files in verl's row format: JSONL, parquet, folders that ``datasets`` saved with ``save_to_disk``, or generated
    rows, ``reasoning_gym:TASK?size=1000&seed=1``. Empty: the bundled task (reverse a 4-digit string)."""
    val_files: list[str] = field(default_factory=list)
    """Files of the prompts used for validation. Empty: the bundled task's, or none with ``train_files``."""
    tokenizer: str | None = None
    """Folder of a Hugging Face tokenizer. Null: the model folder's; for a new model, one token per character."""
    prompt_key: str = "prompt"
    """The rows' field with the prompt: chat messages or text."""
    reward_fn_key: str = "data_source"
    """The rows' field that names the task, by which rewards and validation scores are told apart."""
    train_batch_size: int = 64
    """Prompts per step."""
    val_batch_size: int | None = None
    """Prompts per validation batch. Null: all at once."""
    max_prompt_length: int = 512
    """Longest prompt in tokens."""
    max_response_length: int = 6
    """Longest response in tokens, the end-of-sequence token included."""
    filter_overlong_prompts: bool = False
    """Leave out prompts that are too long."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What else happens to a prompt that is too long: an error that names it, or tokens are cut from its left, its
    right or its middle."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the tokenizer's chat template, such as ``enable_thinking``."""
    shuffle: bool = True
    """Draw the prompts of each epoch in a new random order."""
    seed: int | None = None
    """Seed of that order and of the bundled task's files. Null: ``trainer.seed``."""

    active_if: ClassVar[Conditions] = {
        "val_batch_size": Given("trainer.test_freq"),
        "truncation": Needs(".filter_overlong_prompts", (False,)),
        "seed": AnyOf((Needs(".shuffle"), Unset(".train_files"))),
    }

    def __post_init__(self) -> None:
        require_positive(self, "train_batch_size", "val_batch_size", "max_prompt_length", "max_response_length")
        require_not_negative(self, "seed")
        if self.val_files and not self.train_files:
            raise ValueError("val_files needs train_files; the bundled task brings both")


@dataclass(frozen=True, kw_only=True)
class CustomRewardConfig:
    """A reward function in a Python file."""

    path: str | None = None
    """The file. Null: the reward that belongs to the rows' data source."""
    name: str = "compute_score"
    """The function in it: ``(data_source, solution_str, ground_truth, extra_info) -> float | dict``."""

    active_if: ClassVar[Conditions] = {"name": Given(".path")}


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """A reward model: a sequence classifier with one label, in Hugging Face format."""

    enable: bool = False
    """Score responses with it; alone, or added to ``reward.terms`` and the custom function where they are given."""
    path: str | None = None
    """Its folder."""
    weight: float = 1.0
    """What its scores are multiplied by."""
    use_own_tokenizer: bool = False
    """Give it prompt and response as text, by its own tokenizer and chat template, and not the policy's tokens."""
    micro_batch_size_per_gpu: int | None = None
    """Rows per forward pass on each worker. Null: all."""
    enable_resource_pool: bool = False
    """Workers of its own, and not those of the other roles."""
    nnodes: int = 1
    """Machines of its own workers."""
    n_gpus_per_node: int = 1
    """Its own workers on each machine."""

    active_if: ClassVar[Conditions] = {
        **dict.fromkeys(("path", "weight", "use_own_tokenizer", "micro_batch_size_per_gpu"), Needs(".enable")),
        "enable_resource_pool": Needs(".enable"),
        **dict.fromkeys(("nnodes", "n_gpus_per_node"), AllOf((Needs(".enable"), Needs(".enable_resource_pool")))),
    }

    def __post_init__(self) -> None:
        require_positive(self, "micro_batch_size_per_gpu", "nnodes", "n_gpus_per_node")
        if self.enable and self.path is None:
            raise ValueError("enable=true needs path, the folder of the model")


@dataclass(frozen=True, kw_only=True)
class OverlongBufferConfig:
    """DAPO's soft penalty for responses that come near ``data.max_response_length``; in training only."""

    enable: bool = False
    """Take the penalty off the rewards."""
    len: int = 0
    """The last so many tokens of the longest response are penalised, each more than the one before."""
    penalty_factor: float = 1.0
    """The penalty of the longest response."""

    active_if: ClassVar[Conditions] = dict.fromkeys(("len", "penalty_factor"), Needs(".enable"))

    def __post_init__(self) -> None:
        require_not_negative(self, "len")
        require_positive(self, "penalty_factor")
        if self.enable and self.len == 0:
            raise ValueError("enable=true needs len, a number of tokens")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How responses are scored."""

    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    """A scoring function of your own."""
    terms: dict[str, Any] = field(default_factory=dict)
    """Several rewards by name, added up: each with a ``type`` (``function``, ``sandbox``, ``remote``), a ``weight`` (1)
    and the options of its type in `kapell.trainer.reward_terms`. Empty: the function above alone."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """A reward model."""
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    """A penalty for long responses."""
    missing_eos_penalty: float | None = None
    """In training, taken off the reward of a response that is cut at ``data.max_response_length``. Null: nothing is."""
    timeout: float = 60.0
    """Seconds that a function may take for one response."""
    concurrency: int = 16
    """Responses that an async function scores at once."""
    on_error: Literal["raise", "fallback"] = "raise"
    """What a response that cannot be scored does: stop the run, or count as ``fallback_score`` and in
    ``reward/errors``."""
    fallback_score: float = 0.0
    """The score of such a response."""

    active_if: ClassVar[Conditions] = {"fallback_score": Needs(".on_error", ("fallback",))}

    def __post_init__(self) -> None:
        require_positive(self, "timeout", "concurrency", "missing_eos_penalty")
        if self.terms and self.custom_reward_function.path is not None:
            raise ValueError(
                "terms and custom_reward_function are both given; a function can be a term of type function"
            )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a run can be told."""

    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Advantages."""
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    """The policy."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value model."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Scores."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The run."""
    backend: BackendConfig = field(default_factory=BackendConfig)
    """The workers' home."""

    active_if: ClassVar[Conditions] = {"critic": Needs("algorithm.adv_estimator", ("gae",))}

    def __post_init__(self) -> None:
        buffer, longest = self.reward.overlong_buffer, self.data.max_response_length
        if buffer.enable and buffer.len > longest:
            raise ValueError(
                f"reward.overlong_buffer.len={buffer.len} is more than data.max_response_length={longest}; lower it"
            )
        for role in ("actor_rollout_ref.actor", "critic"):
            mini = self.actor_rollout_ref.actor.ppo_mini_batch_size
            if role == "critic" and self.critic.ppo_mini_batch_size is not None:
                mini = self.critic.ppo_mini_batch_size
            if mini > self.data.train_batch_size:
                raise ValueError(
                    f"{role}.ppo_mini_batch_size={mini} prompts is more than data.train_batch_size="
                    f"{self.data.train_batch_size}; lower it"
                )
        strategies = {"actor_rollout_ref.actor": self.actor_rollout_ref.actor.strategy}
        if self.use_critic:
            strategies["critic"] = self.critic.strategy
        for role, strategy in strategies.items():
            if strategy == "fsdp2" and self.backend.name == "local":
                raise ValueError(
                    f"{role}.strategy=fsdp2 needs a process for each worker, and backend=local has one for all; use "
                    "strategy=ddp, or backend=ray"
                )

    @property
    def actor_warmup(self) -> int:
        """First steps in which only the critic learns, where there is one."""
        return self.trainer.critic_warmup if self.use_critic else 0

    @property
    def use_critic(self) -> bool:
        """Whether the run has a value model."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def use_reference(self) -> bool:
        """Whether the run has a frozen reference model."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss
