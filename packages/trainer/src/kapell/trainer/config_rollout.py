"""The configuration of sampling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from .config_checks import require_not_negative, require_positive, require_range
from .config_conditions import AllOf, AnyOf, Condition, Conditions, Given, Needs

__all__ = [
    "ACTOR_TOKENS",
    "LOG_PROB_TOKENS",
    "USES_REFERENCE",
    "RolloutConfig",
    "RolloutServerConfig",
    "SamplingConfig",
    "set_or_inherited",
]

ACTOR_TOKENS = "actor_rollout_ref.actor.use_dynamic_bsz"
LOG_PROB_TOKENS = "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz"
"""The keys that others inherit."""


def set_or_inherited(value: bool, *keys: str) -> Condition:
    """The first of the keys that is not null has the value."""
    condition: Condition = Needs(keys[-1], (value,))
    for key in reversed(keys[:-1]):
        condition = AnyOf((Needs(key, (value,)), AllOf((Needs(key, (None,)), condition))))
    return condition


USES_REFERENCE = AnyOf((Needs("actor_rollout_ref.actor.use_kl_loss"), Needs("algorithm.use_kl_in_reward")))
"""A run computes the reference's log-probabilities."""
# For the old log-probabilities, or for those of the reference, which takes these sizes where it has none of its own.
_HAS_PASSES = AnyOf((Needs("algorithm.rollout_correction.bypass_mode", (False,)), USES_REFERENCE))


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How validation samples."""

    do_sample: bool = False
    """Sample; otherwise always take the most probable token."""
    temperature: float = 1.0
    """Divides the logits; 0 only without ``do_sample``."""
    top_k: int = -1
    """Sample from the k most probable tokens only; -1 for all."""
    top_p: float = 1.0
    """Sample from the most probable tokens that together reach this probability."""
    n: int = 1
    """Responses per prompt."""

    active_if: ClassVar[Conditions] = dict.fromkeys(("temperature", "top_k", "top_p"), Needs(".do_sample"))

    def __post_init__(self) -> None:
        require_positive(self, "top_p", "n", *(["temperature"] if self.do_sample else []))
        require_not_negative(self, "temperature")
        require_range(self, 0.0, 1.0, "top_p")
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
        require_positive(self, "concurrency", "timeout")
        require_not_negative(self, "retries")


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
    max_num_seqs: int | None = None
    """Most rows that a worker's built-in engine samples at once, which bounds its KV cache. Null: all."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a response, in training and validation. Their tokens stay in the response, for the policy to learn
    them and the reward to see them."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Rows per forward pass when log-probabilities are recomputed. Null: all."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Size these passes by tokens. Null: as the actor's."""
    log_prob_max_token_len_per_gpu: int | None = None
    """Most tokens in one. Null: as the actor's."""
    val_kwargs: SamplingConfig = field(default_factory=SamplingConfig)
    """How validation samples."""

    active_if: ClassVar[Conditions] = {
        # Not the temperature, which the update's log-probabilities use however tokens are chosen.
        **dict.fromkeys(("top_k", "top_p"), Needs(".do_sample")),
        "server": Needs(".name", ("openai",)),
        "max_num_seqs": Needs(".name", ("hf",)),
        "log_prob_use_dynamic_bsz": _HAS_PASSES,
        "log_prob_micro_batch_size_per_gpu": AllOf(
            (_HAS_PASSES, set_or_inherited(False, ".log_prob_use_dynamic_bsz", ACTOR_TOKENS))
        ),
        "log_prob_max_token_len_per_gpu": AllOf(
            (_HAS_PASSES, set_or_inherited(True, ".log_prob_use_dynamic_bsz", ACTOR_TOKENS))
        ),
        "val_kwargs": Given("trainer.test_freq"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(
            self, "temperature", "max_num_seqs", "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu"
        )
        if "" in self.stop:
            raise ValueError(f"stop must not hold an empty text, got {self.stop}")
