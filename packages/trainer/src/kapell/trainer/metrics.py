"""Numbers about a batch, under verl's names."""

# B rows, T response tokens

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kapell.protocol import DataProto

from .algorithms import Metric, keep, masked_mean

__all__ = ["add_metrics", "batch_metrics", "column_metrics", "metrics_of", "spread"]


_MEASURED = (
    *("prompt_mask", "response_mask", "token_level_scores", "token_level_rewards", "advantages", "returns", "values"),
    *("rollout_log_probs", "old_log_probs", "entropys"),
)


def add_metrics(batch: DataProto, metrics: Mapping[str, Metric]) -> DataProto:
    """The batch with more entries in ``meta_info["metrics"]``; an entry under the same name is joined to."""
    before = metrics_of(batch)
    merged = {name: before[name] + metric if name in before else metric for name, metric in metrics.items()}
    result = batch.select()
    result.meta_info["metrics"] = {**before, **merged}
    return result


def metrics_of(batch: DataProto) -> dict[str, Metric]:
    """The metrics that stages have added so far."""
    return dict(batch.meta_info.get("metrics", {}))


def batch_metrics(batch: DataProto) -> dict[str, Metric]:
    """Scores, rewards, advantages, returns, values and lengths of a finished step."""
    return column_metrics({name: batch.column(name) for name in _MEASURED if name in batch.columns})


def column_metrics(columns: Mapping[str, Any]) -> dict[str, Metric]:
    """The same from these columns by name, those that there are."""
    mask_BT = columns["response_mask"].bool()
    prompt_lengths_B = columns["prompt_mask"].sum(-1).float()
    lengths_B = mask_BT.sum(-1).float()
    metrics: dict[str, Metric] = {}
    for name, column in (("score", "token_level_scores"), ("rewards", "token_level_rewards")):
        metrics |= spread(f"critic/{name}", keep(mask_BT, columns[column]).sum(-1))
    for name in ("advantages", "returns", "values"):
        if name in columns:
            metrics |= spread(f"critic/{name}", columns[name][mask_BT])
    metrics |= spread("response_length", lengths_B) | spread("prompt_length", prompt_lengths_B)
    clipped_B = lengths_B == mask_BT.shape[1]
    metrics["response_length/clip_ratio"] = Metric.mean(clipped_B.float().mean().item(), weight=len(mask_BT))
    metrics["perf/total_num_tokens"] = Metric.sum((prompt_lengths_B.sum() + lengths_B.sum()).item())
    if "values" in columns:
        metrics["critic/vf_explained_var"] = _explained_variance(columns, mask_BT)
    if {"rollout_log_probs", "old_log_probs"} <= columns.keys() and mask_BT.numel():
        gap = (columns["rollout_log_probs"] - columns["old_log_probs"]).abs()
        metrics["training/rollout_log_probs_diff_max"] = Metric.max(keep(mask_BT, gap).max().item())
    if "entropys" in columns:
        entropy = masked_mean(columns["entropys"], mask_BT).item()
        metrics["rollout/entropy"] = Metric.mean(entropy, weight=int(mask_BT.sum()))
    return metrics


def spread(name: str, values: Tensor) -> dict[str, Metric]:
    """Mean, maximum and minimum of values of any shape, as ``name/mean`` and so on; nothing of none."""
    if not values.numel():
        return {}
    return {
        f"{name}/mean": Metric.mean(values.mean().item(), weight=values.numel()),
        f"{name}/max": Metric.max(values.max().item()),
        f"{name}/min": Metric.min(values.min().item()),
    }


def _explained_variance(columns: Mapping[str, Any], mask_BT: Tensor) -> Metric:
    returns, values = columns["returns"][mask_BT], columns["values"][mask_BT]
    if returns.numel() < 2:
        return Metric.mean(0.0, weight=0)
    unexplained = torch.var(returns - values) / (torch.var(returns) + 1e-5)  # returns may all be equal
    return Metric.mean(1.0 - unexplained.item(), weight=returns.numel())
