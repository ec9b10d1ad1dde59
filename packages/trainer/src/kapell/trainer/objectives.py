"""What an update minimises: values that are sent to the workers, each a function from a mini-batch's rows to a loss."""

# B rows, T response tokens

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from .algorithms import (
    Aggregation,
    BatchTotals,
    LossResult,
    aggregated_loss,
    columns_of,
    get_policy_loss,
    kl_loss,
    policy_loss,
    value_loss,
)
from .forward import MODEL_COLUMNS, Columns, policy_forward, value_forward

__all__ = ["PolicyObjective", "ValueObjective"]

_OPTIONAL_COLUMNS = ("loss_mask", "rollout_is_weights")


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """A policy loss, minus an entropy bonus, plus a KL penalty."""

    loss_mode: str = "vanilla"
    """Name or import path of the policy loss."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its options, such as ``clip_ratio``."""
    loss_agg_mode: str = "token-mean"
    """How the tokens' losses are put together."""
    temperature: float = 1.0
    """The sampler's."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus; the entropy is reported in any case."""
    kl_coef: float | None = None
    """Weight of the KL divergence from the reference; None leaves it out."""
    kl_kind: str = "low_var_kl"
    """The estimator of that divergence."""
    max_response_length: int | None = None
    """The constant of ``seq-mean-token-sum-norm``, which needs it."""

    def __post_init__(self) -> None:
        _require_scale(self)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that an update reads."""
        required = [name for name, needed in columns_of(get_policy_loss(self.loss_mode)).items() if needed]
        loss_columns = [name for name in required if name not in ("log_probs", *_OPTIONAL_COLUMNS)]
        reference = ["ref_log_prob"] if self.kl_coef is not None else []
        return tuple(dict.fromkeys([*MODEL_COLUMNS, "response_mask", *loss_columns, *reference]))

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """The columns that it reads where a batch has them."""
        optional = [name for name, needed in columns_of(get_policy_loss(self.loss_mode)).items() if not needed]
        return tuple(dict.fromkeys([*_OPTIONAL_COLUMNS, *optional]))

    def __call__(self, model: PreTrainedModel, columns: Columns, totals: BatchTotals) -> LossResult:
        """The loss of these rows, as their part of the mini-batch with ``totals``, counted on the loss mask."""
        log_probs_BT, entropy_BT, _ = policy_forward(
            model,
            columns,
            temperature=self.temperature,
            with_entropy=True,
            entropy_gradient=bool(self.entropy_coeff),
        )
        assert entropy_BT is not None
        mask_BT = columns.get("loss_mask", columns["response_mask"])
        mode, scale = self.loss_agg_mode, self.max_response_length
        loss, metrics = policy_loss(
            self.loss_mode, {**columns, "log_probs": log_probs_BT}, self.options, mode=mode, totals=totals, scale=scale
        )
        entropy, numbers = aggregated_loss("actor/entropy", entropy_BT, mask_BT, mode, totals, scale=scale)
        metrics |= numbers
        if self.entropy_coeff:
            loss = loss - self.entropy_coeff * entropy
        if self.kl_coef is not None:
            penalty, numbers = kl_loss(
                log_probs_BT,
                columns["ref_log_prob"],
                mask_BT,
                kind=self.kl_kind,
                mode=mode,
                totals=totals,
                scale=scale,
            )
            loss = loss + self.kl_coef * penalty
            metrics |= numbers
        return LossResult(loss, metrics)


@dataclass(frozen=True, kw_only=True)
class ValueObjective:
    """The clipped value loss."""

    cliprange_value: float | None = 0.5
    """How far a new value may move from the old one before its loss is clipped."""
    loss_agg_mode: str = "token-mean"
    """How the tokens' losses are put together."""
    max_response_length: int | None = None
    """The constant of ``seq-mean-token-sum-norm``, which needs it."""

    columns = (*MODEL_COLUMNS, "response_mask", "values", "returns")
    optional_columns = ()

    def __post_init__(self) -> None:
        _require_scale(self)

    def __call__(self, model: PreTrainedModel, columns: Columns, totals: BatchTotals) -> LossResult:
        """The loss of these rows, as their part of the mini-batch with ``totals``."""
        return value_loss(
            value_forward(model, columns),
            columns["values"],
            columns["returns"],
            columns["response_mask"],
            cliprange_value=self.cliprange_value,
            mode=self.loss_agg_mode,
            totals=totals,
            scale=self.max_response_length,
        )


def _require_scale(objective: PolicyObjective | ValueObjective) -> None:
    if objective.loss_agg_mode == Aggregation.SEQ_MEAN_TOKEN_SUM_NORM and objective.max_response_length is None:
        raise ValueError(
            f"loss_agg_mode={objective.loss_agg_mode} divides by the longest response; give max_response_length"
        )
