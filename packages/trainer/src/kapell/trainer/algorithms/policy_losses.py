"""The registry of policy losses and the call that every loss goes through.

A policy loss names the columns that it reads and returns the loss of each token (B, T) with per-token metrics;
importance weights, aggregation and the logged metrics are the same for all:

    @register_policy_loss("plain")
    def plain(log_probs, advantages, *, scale=1.0): return TokenLosses(-advantages * log_probs * scale, {})
"""
# B rows, T response tokens

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from kapell.trainer.algorithms.aggregation import Aggregation, BatchTotals, LossResult, aggregated_loss
from kapell.trainer.algorithms.columns import select_valid
from kapell.trainer.algorithms.kl import KLKind, kl_estimate
from kapell.trainer.algorithms.masked import as_mask
from kapell.trainer.algorithms.registry import MissingColumnError, Registry, call_with_columns

__all__ = ["TokenLosses", "get_policy_loss", "policy_loss", "policy_losses", "register_policy_loss"]


class TokenLosses(NamedTuple):
    """What a policy loss returns; masked slots may hold anything."""

    losses: Tensor
    """(B, T), with gradient"""
    metrics: Mapping[str, Tensor] = {}
    """name -> (B, T) or bool (B, T), logged as `actor/name`: its mean over the tokens that count in the loss"""


PolicyLoss = Callable[..., TokenLosses | tuple[Tensor, Mapping[str, Tensor]]]

policy_losses: Registry[PolicyLoss] = Registry("policy loss")
register_policy_loss = policy_losses.register
get_policy_loss = policy_losses.get


def policy_loss(
    loss: str | PolicyLoss,
    columns: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    *,
    mode: Aggregation | str,
    totals: BatchTotals,
    scale: float | None = None,
) -> LossResult:
    """One micro-batch's part of the policy loss (by name, import path or the function itself).

    `response_mask` must be among the columns and says what belongs to a response; `loss_mask`, if there, says which of
    its tokens count in the loss. `totals` are counted on the latter over the whole mini-batch. `rollout_is_weights`, if
    there, multiply the token losses without a gradient. Token columns (`columns.TOKEN_COLUMNS`) reach the loss with
    zeros in masked slots. Metrics: `actor/pg_loss`, those of the loss, and, where there are `old_log_probs`,
    `actor/approx_kl`, the k3 estimate of the KL divergence from the old policy (as CleanRL has it).
    """
    function = get_policy_loss(loss) if isinstance(loss, str) else loss
    if "response_mask" not in columns:
        raise MissingColumnError("policy_loss", "response_mask", tuple(sorted(columns)))
    response_mask_BT = as_mask(columns["response_mask"])
    loss_mask_BT = response_mask_BT & as_mask(columns.get("loss_mask", response_mask_BT))
    kept = select_valid(columns, response_mask_BT) | {"response_mask": response_mask_BT, "loss_mask": loss_mask_BT}
    losses_BT, *rest = call_with_columns(function, kept, options)
    if "rollout_is_weights" in kept:
        losses_BT = losses_BT * kept["rollout_is_weights"].detach()
    token_metrics = {f"actor/{name}": values_BT for name, values_BT in dict(*rest).items()}
    if "old_log_probs" in kept and "log_probs" in kept:
        policy_BT = kept["log_probs"].detach()
        token_metrics["actor/approx_kl"] = kl_estimate(kept["old_log_probs"], policy_BT, KLKind.K3)
    return aggregated_loss(
        "actor/pg_loss", losses_BT, loss_mask_BT, mode, totals, scale=scale, token_metrics=token_metrics
    )
