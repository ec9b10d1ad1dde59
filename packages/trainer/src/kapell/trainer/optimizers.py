"""Optimizers of torch and their learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from .config import OptimConfig

__all__ = ["build_optimizer", "build_schedule", "learning_rate_factor"]


def build_optimizer(parameters: Iterable[Tensor], config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer that a configuration names."""
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def build_schedule(optimizer: torch.optim.Optimizer, config: OptimConfig, *, total_steps: int | None) -> LambdaLR:
    """Its learning rate, which moves once per optimizer step; ``total_steps`` is their number in the whole run."""
    return LambdaLR(
        optimizer,
        lambda step: learning_rate_factor(
            step,
            shape=config.lr_scheduler_type,
            warmup_steps=config.lr_warmup_steps,
            total_steps=total_steps,
            min_ratio=config.min_lr_ratio,
        ),
    )


def learning_rate_factor(
    step: int, *, shape: str, warmup_steps: int, total_steps: int | None, min_ratio: float
) -> float:
    """Share of the peak learning rate at an optimizer step, counted from 0.

    >>> [learning_rate_factor(s, shape="linear", warmup_steps=2, total_steps=4, min_ratio=0.0) for s in range(5)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if shape == "constant":
        return 1.0
    if total_steps is None:
        raise ValueError(f"a {shape} schedule needs the total number of optimizer steps")
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    left = 1.0 - progress if shape == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return min_ratio + (1.0 - min_ratio) * left
