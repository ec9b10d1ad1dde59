"""The configuration of the models: the policy in its three roles, and the critic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from .config_checks import require_not_negative, require_positive
from .config_conditions import AllOf, AnyOf, Conditions, Lacks, Needs, OptionOf, Unset
from .config_optim import OptimConfig
from .config_rollout import ACTOR_TOKENS, LOG_PROB_TOKENS, USES_REFERENCE, RolloutConfig, set_or_inherited

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "CriticConfig",
    "CriticModelConfig",
    "ModelConfig",
    "PolicyLossConfig",
    "RefConfig",
    "RefModelConfig",
]


_ADAPTER_CONDITIONS: Conditions = dict.fromkeys(("lora_alpha", "target_modules"), Lacks(".lora_rank", (0,)))


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig:
    """The policy objective."""

    loss_mode: str = "vanilla"
    """Name or import path of the policy loss; ``vanilla`` is PPO's clipped objective."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its further options by name, such as ``dro_beta`` of ``dro``."""


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """The policy update."""

    ppo_epochs: int = 2
    """Passes over the batch of a step."""
    ppo_mini_batch_size: int = 32
    """Prompts (with all their samples) per optimizer step."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Rows per forward and backward pass on each worker. Null: all. Changes memory, never the numbers."""
    use_dynamic_bsz: bool = False
    """Size the passes by tokens and not by rows, here and where another ``use_dynamic_bsz`` is null."""
    ppo_max_token_len_per_gpu: int = 16384
    """Most tokens in a pass on each worker, padding not counted; a longer row is an error."""
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    """What each worker holds of the policy and its optimizer: a copy, or a part (torch's ``fully_shard``). A part needs
    workers with processes of their own, as Ray's are; for sampling each gathers the whole policy."""
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
    target_kl: float | None = None
    """Make no further pass over a step's batch once the last mini-batch of one has a larger ``actor/approx_kl``, in
    nats per token. The schedule counts the steps that are made. Null: make all passes."""
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

    active_if: ClassVar[Conditions] = {
        "ppo_micro_batch_size_per_gpu": Needs(".use_dynamic_bsz", (False,)),
        "ppo_max_token_len_per_gpu": AnyOf(
            (
                Needs(".use_dynamic_bsz"),
                Needs(LOG_PROB_TOKENS),
                Needs("actor_rollout_ref.ref.log_prob_use_dynamic_bsz"),
                Needs("critic.use_dynamic_bsz"),
            )
        ),
        "clip_ratio": AllOf(
            (
                OptionOf(".policy_loss.loss_mode", "clip_ratio"),
                AnyOf((Unset(".clip_ratio_low"), Unset(".clip_ratio_high"))),
            )
        ),
        **{
            name: OptionOf(".policy_loss.loss_mode", name)
            for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
        },
        "target_kl": Lacks(".ppo_epochs", (1,)),
        **dict.fromkeys(("kl_loss_coef", "kl_loss_type"), Needs(".use_kl_loss")),
    }

    def __post_init__(self) -> None:
        require_positive(self, "ppo_epochs", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "grad_clip")
        require_positive(self, "ppo_max_token_len_per_gpu", "target_kl")
        require_positive(self, "clip_ratio", "clip_ratio_low", "clip_ratio_high")
        if self.clip_ratio_c <= 1.0:
            raise ValueError(f"clip_ratio_c must be above 1, got {self.clip_ratio_c}")


@dataclass(frozen=True, kw_only=True)
class RefModelConfig:
    """Another model as the reference."""

    path: str | None = None
    """Folder with a Hugging Face causal language model with the policy's tokens. Null: the policy's starting point."""


@dataclass(frozen=True, kw_only=True)
class RefConfig:
    """The frozen reference model; it exists when a KL penalty asks for it."""

    model: RefModelConfig = field(default_factory=RefModelConfig)
    """Which model it is."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Rows per forward pass. Null: ``rollout.log_prob_micro_batch_size_per_gpu``."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Size these passes by tokens. Null: as the rollout's."""
    log_prob_max_token_len_per_gpu: int | None = None
    """Most tokens in one. Null: as the rollout's."""

    active_if: ClassVar[Conditions] = {
        "log_prob_micro_batch_size_per_gpu": set_or_inherited(
            False, ".log_prob_use_dynamic_bsz", LOG_PROB_TOKENS, ACTOR_TOKENS
        ),
        "log_prob_max_token_len_per_gpu": set_or_inherited(
            True, ".log_prob_use_dynamic_bsz", LOG_PROB_TOKENS, ACTOR_TOKENS
        ),
    }

    def __post_init__(self) -> None:
        require_positive(self, "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu")


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
    dtype: Literal["float32", "bfloat16"] = "float32"
    """In what the policy's matrix products are computed when it is trained, sampled from and compared with (autocast).
    Weights, gradients, the optimizer's moments, log-probabilities and losses are float32 in any case."""
    enable_gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass, in place of keeping its activations: less memory, more time."""
    lora_rank: int = 0
    """Train a low-rank adapter (LoRA) of this rank, and not the weights. 0: the weights. Needs the extra ``lora``."""
    lora_alpha: int = 16
    """Its scale, times the rank."""
    target_modules: Any = "all-linear"
    """The modules that get one: a list of names, a regular expression, or ``all-linear``."""

    active_if: ClassVar[Conditions] = {
        **dict.fromkeys(("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads"), Unset(".path")),
        **_ADAPTER_CONDITIONS,
    }

    def __post_init__(self) -> None:
        require_positive(self, "hidden_size", "num_hidden_layers", "num_attention_heads")
        _check_adapter(self)
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

    active_if: ClassVar[Conditions] = {
        "ref": USES_REFERENCE,
    }


@dataclass(frozen=True, kw_only=True)
class CriticModelConfig:
    """The critic's starting point."""

    path: str | None = None
    """Folder with a Hugging Face model. Null: the policy's own starting point, with a new value head."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """In what its matrix products are computed; see the policy's."""
    enable_gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass, in place of keeping its activations."""
    lora_rank: int = 0
    """Train a low-rank adapter (LoRA) of this rank, and not the weights. 0: the weights. Needs the extra ``lora``."""
    lora_alpha: int = 16
    """Its scale, times the rank."""
    target_modules: Any = "all-linear"
    """The modules that get one: a list of names, a regular expression, or ``all-linear``."""

    active_if: ClassVar[Conditions] = _ADAPTER_CONDITIONS

    def __post_init__(self) -> None:
        _check_adapter(self)


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value model and its update; it exists with ``algorithm.adv_estimator=gae``."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    """Where the model comes from."""
    ppo_epochs: int | None = None
    """Passes over the batch of a step. Null: the actor's."""
    ppo_mini_batch_size: int | None = None
    """Prompts (with all their samples) per optimizer step. Null: the actor's."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Rows per forward and backward pass on each worker. Null: all."""
    forward_micro_batch_size_per_gpu: int | None = None
    """Rows per forward pass when values are computed. Null: all."""
    use_dynamic_bsz: bool | None = None
    """Size the passes by tokens and not by rows. Null: as the actor's."""
    ppo_max_token_len_per_gpu: int | None = None
    """Most tokens per forward and backward pass on each worker. Null: as the actor's."""
    forward_max_token_len_per_gpu: int | None = None
    """Most tokens per forward pass when values are computed. Null: ``ppo_max_token_len_per_gpu``."""
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    """What each worker holds of the model and its optimizer: a copy, or a part; see the actor's."""
    shuffle: bool | None = None
    """Deal prompts to mini-batches in a new random order each epoch. Null: as the actor does."""
    cliprange_value: float = 0.5
    """How far a new value may move from the old one before its loss is clipped."""
    loss_agg_mode: str | None = None
    """How the tokens' losses are put together. Null: as the actor's."""
    grad_clip: float = 1.0
    """Largest gradient norm; the norm before clipping is reported."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""

    active_if: ClassVar[Conditions] = {
        **dict.fromkeys(
            ("ppo_micro_batch_size_per_gpu", "forward_micro_batch_size_per_gpu"),
            set_or_inherited(False, ".use_dynamic_bsz", ACTOR_TOKENS),
        ),
        **dict.fromkeys(
            ("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu"),
            set_or_inherited(True, ".use_dynamic_bsz", ACTOR_TOKENS),
        ),
    }

    def __post_init__(self) -> None:
        require_positive(self, "ppo_epochs", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu")
        require_positive(self, "ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu")
        require_positive(self, "forward_micro_batch_size_per_gpu", "cliprange_value", "grad_clip")


def _check_adapter(model: ModelConfig | CriticModelConfig) -> None:
    require_not_negative(model, "lora_rank")
    require_positive(model, "lora_alpha")
    targets = model.target_modules
    if not isinstance(targets, str) and not (isinstance(targets, list) and all(isinstance(x, str) for x in targets)):
        raise ValueError(f"target_modules must be a text or a list of texts, got {targets!r}")
