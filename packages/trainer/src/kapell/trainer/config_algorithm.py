"""The configuration of the algorithm: advantages, the KL penalty in the reward, and the correction of rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from .config_checks import require_not_negative, require_positive, require_range
from .config_conditions import Conditions, Given, Needs, OptionOf

__all__ = ["AlgorithmConfig", "KLControlConfig", "RolloutCorrectionConfig"]


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

    active_if: ClassVar[Conditions] = {
        "horizon": Needs(".type", ("adaptive",)),
        "target_kl": Needs(".type", ("adaptive",)),
    }

    def __post_init__(self) -> None:
        require_positive(self, "horizon", "target_kl")
        require_not_negative(self, "kl_coef")


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig:
    """What is done about the gap between the policy that sampled and the one that is trained.

    Its size is reported as ``rollout_corr/...`` in any case. `kapell.trainer.algorithms.correct_rollout` has the
    formulas; rho is the probability of a token by the trained policy over that by the sampler.
    """

    rollout_is: str | None = None
    """Weigh token losses by rho of each ``token``, of the whole ``sequence``, or by its mean per token
    (``geometric``). Null: no weights."""
    rollout_is_threshold: int | float | str = 2.0
    """Larger weights are cut to this. Two bounds, ``0.5_5.0``, set weights outside to 0 (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Scale the weights so that their mean over the batch is 1."""
    rollout_rs: str | None = None
    """Leave tokens or sequences out of the loss by a statistic, or several by commas: ``token_k1``, ``seq_sum_k1``,
    ``seq_mean_k3``, ``seq_max_k2``, ... Null: all count."""
    rollout_rs_threshold: int | float | str | None = None
    """The bound of each statistic, by commas: one number, or ``0.5_2.0`` for k1."""
    bypass_mode: bool = False
    """Take the sampler's log-probabilities as the old ones, which saves the forward pass that recomputes them. The
    loss's own ratio is then the correction; weights and rejection have nothing to act on and are refused."""

    active_if: ClassVar[Conditions] = {
        "rollout_is_threshold": Given(".rollout_is"),
        "rollout_is_batch_normalize": Given(".rollout_is"),
        "rollout_rs_threshold": Given(".rollout_rs"),
    }


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How rewards become advantages."""

    adv_estimator: str = "grpo"
    """The advantage estimator, by name or import path. ``gae`` is PPO with a critic; the group estimators, such as
    ``grpo``, need none."""
    adv_options: dict[str, Any] = field(default_factory=dict)
    """Its further options by name, such as ``unbiased_std`` of ``grpo``."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 1.0
    """GAE's lambda."""
    norm_scope: str | None = None
    """Over what advantages are scaled to unit spread: none, group, batch, mini-batch (by the update). Null: as the
    estimator's paper has it."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence from the reference model from each token's reward."""
    kl_penalty: str = "kl"
    """The estimator of that divergence."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    """Its weight."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """Off-policy correction."""

    active_if: ClassVar[Conditions] = {
        "gamma": OptionOf(".adv_estimator", "gamma"),
        "lam": OptionOf(".adv_estimator", "lam"),
        "kl_penalty": Needs(".use_kl_in_reward"),
        "kl_ctrl": Needs(".use_kl_in_reward"),
    }

    def __post_init__(self) -> None:
        require_range(self, 0.0, 1.0, "gamma", "lam")
