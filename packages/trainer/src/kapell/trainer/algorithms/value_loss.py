"""The critic's loss."""
# B rows, T response tokens

import torch
from torch import Tensor

from kapell.trainer.algorithms.aggregation import Aggregation, BatchTotals, LossResult, aggregated_loss
from kapell.trainer.algorithms.masked import keep

__all__ = ["value_loss"]


def value_loss(
    vpreds: Tensor,
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    cliprange_value: float | None,
    mode: Aggregation | str,
    totals: BatchTotals,
    scale: float | None = None,
) -> LossResult:
    """Half of max((v-R)^2, (clip(v, v_old-e, v_old+e)-R)^2), aggregated; `vpreds` are v, `values` v_old, all (B, T).

    The clip is around the old value, as in the PPO code that 1707.06347 refers to; None turns it off.
    Metrics: critic/vf_loss, critic/vf_clipfrac, critic/vpred_mean.
    """
    vpreds_BT, values_BT, returns_BT = (keep(response_mask, column) for column in (vpreds, values, returns))
    losses_BT = (vpreds_BT - returns_BT).square()
    metrics = {"critic/vpred_mean": vpreds_BT}
    if cliprange_value is not None:
        nearby_BT = torch.clamp(vpreds_BT, values_BT - cliprange_value, values_BT + cliprange_value)
        clipped_BT = (nearby_BT - returns_BT).square()
        metrics["critic/vf_clipfrac"] = clipped_BT > losses_BT
        losses_BT = torch.maximum(losses_BT, clipped_BT)
    return aggregated_loss(
        "critic/vf_loss", losses_BT / 2, response_mask, mode, totals, scale=scale, token_metrics=metrics
    )
