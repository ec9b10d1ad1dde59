"""The typed configuration of a run, in the groups and under the names that verl's users know.

Every key does something, and its value is checked where its group is built. `kapell.trainer.config_load` reads files
and command-line overrides into these classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

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
    "PolicyLossConfig",
    "RefConfig",
    "RewardConfig",
    "RolloutConfig",
    "RolloutServerConfig",
    "SamplingConfig",
    "TrainerConfig",
]


def _require_positive(config: object, *names: str) -> None:
    """Raise ``ValueError`` for a field that is given and not above 0."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be above 0, got {value}")


def _require_range(config: object, low: float, high: float, *names: str) -> None:
    """Raise ``ValueError`` for a field outside ``[low, high]``."""
    for name in names:
        value = getattr(config, name)
        if not low <= value <= high:
            raise ValueError(f"{name} must lie between {low:g} and {high:g}, got {value}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where prompts come from and how they are batched."""

    train_files: list[str] = field(default_factory=list)
    """JSONL or parquet files in verl's row format. Empty: the bundled task (reverse a 4-digit string)."""
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
    """Leave out prompts that are too long, instead of an error that names the first."""
    shuffle: bool = True
    """Draw the prompts of each epoch in a new random order."""
    seed: int | None = None
    """Seed of that order and of the bundled task's files. Null: ``trainer.seed``."""

    def __post_init__(self) -> None:
        _require_positive(self, "train_batch_size", "val_batch_size", "max_prompt_length", "max_response_length")
        if self.val_files and not self.train_files:
            raise ValueError("val_files needs train_files; the bundled task brings both")


@dataclass(frozen=True, kw_only=True)
class KLControlConfig:
    """The weight of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """``adaptive`` steers the weight so that the KL divergence stays near ``target_kl``."""
    kl_coef: float = 0.001
    """The weight, or its first value."""
    horizon: int = 10_000
    """Rows over which the adaptive weight may change by the size of its error."""
    target_kl: float = 0.1
    """Wanted KL divergence per token, in nats."""

    def __post_init__(self) -> None:
        _require_positive(self, "horizon", "target_kl")


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How rewards become advantages."""

    adv_estimator: str = "grpo"
    """The advantage estimator. ``gae`` is PPO with a critic; the group estimators, such as ``grpo``, need none."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 1.0
    """GAE's lambda."""
    norm_scope: str | None = None
    """Over what advantages are scaled to unit spread: none, group, batch. Null: as the estimator's paper has it."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence from the reference model from each token's reward."""
    kl_penalty: str = "kl"
    """The estimator of that divergence."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    """Its weight."""

    def __post_init__(self) -> None:
        _require_range(self, 0.0, 1.0, "gamma", "lam")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its learning-rate schedule, which moves once per optimizer step."""

    lr: float = 2e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the schedule after warm-up."""
    lr_warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises from 0."""
    min_lr_ratio: float = 0.0
    """Last learning rate of ``cosine`` and ``linear``, as a share of ``lr``."""

    def __post_init__(self) -> None:
        _require_positive(self, "lr", "eps")
        _require_range(self, 0.0, 1.0, "min_lr_ratio")
        if self.lr_warmup_steps < 0:
            raise ValueError(f"lr_warmup_steps must not be negative, got {self.lr_warmup_steps}")


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig:
    """The policy objective."""

    loss_mode: str = "vanilla"
    """Name of the policy loss; ``vanilla`` is PPO's clipped objective."""


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """The policy update."""

    ppo_epochs: int = 2
    """Passes over the batch of a step."""
    ppo_mini_batch_size: int = 32
    """Prompts (with all their samples) per optimizer step."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Rows per forward and backward pass on each worker. Null: all. Changes memory, never the numbers."""
    shuffle: bool = True
    """Deal prompts to mini-batches in a new random order each epoch."""
    clip_ratio: float = 0.2
    """Clip range of the probability ratio; sets both bounds where they are null."""
    clip_ratio_low: float | None = None
    """Clip range below 1."""
    clip_ratio_high: float | None = None
    """Clip range above 1."""
    clip_ratio_c: float = 3.0
    """Bound of dual clipping, for negative advantages."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    """The policy objective."""
    loss_agg_mode: str = "token-mean"
    """How the tokens' losses are put together."""
    entropy_coeff: float = 0.01
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add the KL divergence from the reference model to the loss."""
    kl_loss_coef: float = 0.001
    """Its weight."""
    kl_loss_type: str = "low_var_kl"
    """The estimator of that divergence."""
    grad_clip: float = 1.0
    """Largest gradient norm; the norm before clipping is reported."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""

    def __post_init__(self) -> None:
        _require_positive(self, "ppo_epochs", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "grad_clip")
        _require_positive(self, "clip_ratio", "clip_ratio_low", "clip_ratio_high")
        if self.clip_ratio_c <= 1.0:
            raise ValueError(f"clip_ratio_c must be above 1, got {self.clip_ratio_c}")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How validation samples."""

    do_sample: bool = False
    """Sample; otherwise always take the most probable token."""
    temperature: float = 1.0
    """Divides the logits."""
    top_k: int = -1
    """Sample from the k most probable tokens only; -1 for all."""
    top_p: float = 1.0
    """Sample from the most probable tokens that together reach this probability."""
    n: int = 1
    """Responses per prompt."""

    def __post_init__(self) -> None:
        _require_positive(self, "temperature", "top_p", "n")
        _require_range(self, 0.0, 1.0, "top_p")
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"top_k must be -1 (all tokens) or at least 1, got {self.top_k}")
        if not self.do_sample and self.n > 1:
            raise ValueError(f"n={self.n} responses per prompt are all the same without do_sample; set do_sample=true")


@dataclass(frozen=True, kw_only=True)
class RolloutServerConfig:
    """The server that samples with ``rollout.name=openai``; `kapell.trainer.openai_engine` says what it must do."""

    url: str = "http://127.0.0.1:8000"
    """Its address, without ``/v1``."""
    model: str = "default"
    """The model's name there."""
    reload_path: str | None = "/update_weights_from_disk"
    """Path to which ``{"model_path": FOLDER}`` is posted when the policy has changed (SGLang's). Null: the server keeps
    its weights, so that training is off-policy."""
    concurrency: int = 32
    """Requests at once, per worker."""
    timeout: float = 600.0
    """Seconds without a byte after which a request counts as failed."""
    retries: int = 3
    """Further attempts of a failed request."""
    api_key_env: str | None = None
    """Environment variable with a bearer token."""

    def __post_init__(self) -> None:
        _require_positive(self, "concurrency", "timeout")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(SamplingConfig):
    """How training samples; the log-probabilities of the update use the same temperature."""

    name: Literal["hf", "openai"] = "hf"
    """What samples: the built-in engine on the actor's own weights, or a server."""
    server: RolloutServerConfig = field(default_factory=RolloutServerConfig)
    """That server."""
    do_sample: bool = True
    """Sample; otherwise always take the most probable token."""
    n: int = 8
    """Responses per prompt."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Rows per forward pass when log-probabilities are recomputed. Null: all."""
    val_kwargs: SamplingConfig = field(default_factory=SamplingConfig)
    """How validation samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(self, "log_prob_micro_batch_size_per_gpu")


@dataclass(frozen=True, kw_only=True)
class RefConfig:
    """The frozen reference model; it exists when a KL penalty asks for it."""

    log_prob_micro_batch_size_per_gpu: int | None = None
    """Rows per forward pass. Null: all."""

    def __post_init__(self) -> None:
        _require_positive(self, "log_prob_micro_batch_size_per_gpu")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy: a folder, or a new model of a given shape."""

    path: str | None = None
    """Folder with a Hugging Face causal language model. Null: a new model of the shape below, with random weights."""
    model_type: str = "gpt2"
    """Architecture of a new model, by its name in transformers: ``gpt2``, ``llama``, ``qwen3``, ..."""
    hidden_size: int = 64
    """Width of a new model."""
    num_hidden_layers: int = 2
    """Layers of a new model."""
    num_attention_heads: int = 4
    """Attention heads of a new model."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Further fields of the model's Hugging Face configuration."""

    def __post_init__(self) -> None:
        _require_positive(self, "hidden_size", "num_hidden_layers", "num_attention_heads")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads, got {self.hidden_size} and "
                f"{self.num_attention_heads}"
            )


@dataclass(frozen=True, kw_only=True)
class ActorRolloutRefConfig:
    """The policy in its three roles: it is updated, it samples, and its first state is the reference."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model that all three share."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """The policy update."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling."""
    ref: RefConfig = field(default_factory=RefConfig)
    """The frozen reference."""


@dataclass(frozen=True, kw_only=True)
class CriticModelConfig:
    """The critic's starting point."""

    path: str | None = None
    """Folder with a Hugging Face model. Null: the policy's own starting point, with a new value head."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value model and its update; it exists with ``algorithm.adv_estimator=gae``."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    """Where the model comes from."""
    ppo_epochs: int = 2
    """Passes over the batch of a step."""
    ppo_mini_batch_size: int | None = None
    """Prompts (with all their samples) per optimizer step. Null: the actor's."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Rows per forward and backward pass on each worker. Null: all."""
    forward_micro_batch_size_per_gpu: int | None = None
    """Rows per forward pass when values are computed. Null: all."""
    shuffle: bool = True
    """Deal prompts to mini-batches in a new random order each epoch."""
    cliprange_value: float = 0.5
    """How far a new value may move from the old one before its loss is clipped."""
    loss_agg_mode: str = "token-mean"
    """How the tokens' losses are put together."""
    grad_clip: float = 1.0
    """Largest gradient norm; the norm before clipping is reported."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""

    def __post_init__(self) -> None:
        _require_positive(self, "ppo_epochs", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu")
        _require_positive(self, "forward_micro_batch_size_per_gpu", "cliprange_value", "grad_clip")


@dataclass(frozen=True, kw_only=True)
class CustomRewardConfig:
    """A reward function in a Python file."""

    path: str | None = None
    """The file. Null: the reward that belongs to the rows' data source."""
    name: str = "compute_score"
    """The function in it: ``(data_source, solution_str, ground_truth, extra_info) -> float | dict``."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How responses are scored."""

    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    """A scoring function of your own."""
    terms: dict[str, Any] = field(default_factory=dict)
    """Several rewards by name, added up: each with a ``type`` (``function``, ``sandbox``, ``remote``), a ``weight`` (1)
    and the options of its type in `kapell.trainer.reward_terms`. Empty: the function above alone."""
    timeout: float = 60.0
    """Seconds that a function may take for one response."""
    concurrency: int = 16
    """Responses that an async function scores at once."""
    on_error: Literal["raise", "fallback"] = "raise"
    """What a response that cannot be scored does: stop the run, or count as ``fallback_score`` and in
    ``reward/errors``."""
    fallback_score: float = 0.0
    """The score of such a response."""

    def __post_init__(self) -> None:
        _require_positive(self, "timeout", "concurrency")
        if self.terms and self.custom_reward_function.path is not None:
            raise ValueError("give either terms or custom_reward_function; a function can be a term of type function")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The run: how long, on how many workers, where its results go."""

    total_training_steps: int = 60
    """Steps in total."""
    total_epochs: int | None = None
    """Stop after this many passes over the prompts, if that comes first."""
    test_freq: int = 10
    """Validate every N steps and after the last; -1 for never."""
    val_before_train: bool = True
    """Validate before the first step too."""
    save_freq: int = -1
    """Save the model every N steps, beside the final one; -1 for never."""
    critic_warmup: int = 0
    """First N steps in which only the critic learns."""
    nnodes: int = 1
    """Machines."""
    n_gpus_per_node: int = 2
    """Worker processes on each machine (verl's name; without GPUs each is a CPU process)."""
    torch_threads: int = 1
    """Threads of torch in each worker."""
    seed: int = 1
    """Seed of weights, sampling and order."""
    default_local_dir: str | None = None
    """The run's folder. Null: ``runs/<date and time>``."""
    logger: list[Literal["console", "file", "tensorboard", "wandb", "mlflow", "trackio"]] = field(
        default_factory=lambda: ["console", "file"]
    )
    """Where progress goes: a live display, ``metrics.jsonl`` with the curves, and experiment trackers, each of which
    needs the extra of its name."""
    log_val_generations: int = 0
    """Responses of each validation that the live display shows; ``samples.jsonl`` and ``kapell samples`` have all."""
    rollout_data_dir: str | None = None
    """Folder for the responses of training, one JSONL file per step. Null: they are not kept."""
    validation_data_dir: str | None = None
    """Folder for those of validation. Null: they are in the run's ``samples.jsonl`` only."""
    project_name: str = "kapell"
    """The run's project in experiment trackers."""
    experiment_name: str | None = None
    """Its name there. Null: the name of its folder."""
    strict_hooks: bool = False
    """A logger that fails ends the run, where otherwise it is reported once."""

    def __post_init__(self) -> None:
        _require_positive(self, "total_epochs", "nnodes", "n_gpus_per_node", "torch_threads")
        for name in ("total_training_steps", "critic_warmup", "log_val_generations"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("test_freq", "save_freq"):
            if getattr(self, name) < -1:
                raise ValueError(f"{name} must be -1 (never) or a number of steps, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """What runs the workers. ``backend=local`` is short for ``backend.name=local``."""

    shorthand: ClassVar[str] = "name"

    name: str = "ray"
    """``ray``, ``local`` (all workers in this process) or any installed backend."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the backend, such as an address."""


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

    def __post_init__(self) -> None:
        for role in ("actor_rollout_ref.actor", "critic"):
            mini = self.actor_rollout_ref.actor.ppo_mini_batch_size
            if role == "critic" and self.critic.ppo_mini_batch_size is not None:
                mini = self.critic.ppo_mini_batch_size
            if mini > self.data.train_batch_size:
                raise ValueError(
                    f"{role}.ppo_mini_batch_size={mini} prompts is more than data.train_batch_size="
                    f"{self.data.train_batch_size}; lower it"
                )

    @property
    def use_critic(self) -> bool:
        """Whether the run has a value model."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def use_reference(self) -> bool:
        """Whether the run has a frozen reference model."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss
