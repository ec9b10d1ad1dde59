"""Optimizers of torch and their learning-rate schedules."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from .config import OptimConfig

__all__ = ["build_optimizer", "build_schedule", "check_optimizer", "learning_rate_factor", "optimizer_options"]

_FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)  # on both devices; Adagrad on the CPU only
_FUSED_ON = frozenset({"cpu", "cuda"})
_WAYS = frozenset({"fused", "foreach", "differentiable", "capturable"})  # arguments of torch's that exclude each other
_OWN_SHAPES = ("constant", "cosine", "linear")  # their first step is not lost to a learning rate of 0


def build_optimizer(parameters: Iterable[Tensor], config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer that a configuration names, with those of its values that the class takes.

    Raises ``ValueError`` for a class that cannot be found, or arguments that it does not take.
    """
    parameters = list(parameters)
    cls, known = _optimizer_class(config), optimizer_options(config)
    values = {"betas": tuple(config.betas), "eps": config.eps, "weight_decay": config.weight_decay}
    chosen = {name: value for name, value in values.items() if name in known} | dict(config.override_optimizer_config)
    if (
        cls in _FUSED
        and _FUSED_ON.issuperset(parameter.device.type for parameter in parameters)
        and not _WAYS.intersection(config.override_optimizer_config)
    ):
        chosen["fused"] = True  # one operation instead of a dozen for each parameter
    for name in config.override_optimizer_config:
        if name not in known:
            raise ValueError(
                f"override_optimizer_config: {config.optimizer} takes no {name!r}; it takes: {', '.join(known)}"
            )
    try:
        return cls(parameters, lr=config.lr, **chosen)
    except TypeError as error:
        raise ValueError(f"optimizer={config.optimizer} cannot be built with {chosen}: {error}") from error


def optimizer_options(config: OptimConfig) -> tuple[str, ...]:
    """The arguments that the optimizer's class takes."""
    return tuple(inspect.signature(_optimizer_class(config)).parameters)[1:]


def build_schedule(optimizer: torch.optim.Optimizer, config: OptimConfig, *, total_steps: int | None) -> LambdaLR:
    """Its learning rate, which moves once per optimizer step; ``total_steps`` is their number in the whole run.

    Raises ``ValueError`` for a name or arguments that transformers does not know either.
    """
    warmup_steps = max(0, config.lr_warmup_steps) or int(config.lr_warmup_steps_ratio * (total_steps or 0))
    if config.lr_scheduler_type not in _OWN_SHAPES:
        return _transformers_schedule(optimizer, config, warmup_steps, total_steps)
    return LambdaLR(
        optimizer,
        lambda step: learning_rate_factor(
            step,
            shape=config.lr_scheduler_type,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
            min_ratio=config.min_lr_ratio,
        ),
    )


def check_optimizer(config: OptimConfig) -> None:
    """Raise ``ValueError`` for an optimizer or a schedule that cannot be built."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    build_schedule(build_optimizer([parameter], config), config, total_steps=10)


def _optimizer_class(config: OptimConfig) -> Callable[..., torch.optim.Optimizer]:
    try:
        module = importlib.import_module(config.optimizer_impl)
    except ImportError as error:
        raise ValueError(f"optimizer_impl={config.optimizer_impl} cannot be imported: {error}") from error
    known = [name for name, value in vars(module).items() if _is_optimizer(value)]
    if config.optimizer not in known:
        close = get_close_matches(config.optimizer, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has: {', '.join(sorted(known)) or 'none'}"
        raise ValueError(f"{config.optimizer_impl} has no optimizer {config.optimizer!r}; {hint}")
    return getattr(module, config.optimizer)


def _is_optimizer(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer


def _transformers_schedule(
    optimizer: torch.optim.Optimizer, config: OptimConfig, warmup_steps: int, total_steps: int | None
) -> LambdaLR:
    name = config.lr_scheduler_type
    try:
        schedule = get_scheduler(name, optimizer, warmup_steps, total_steps, dict(config.lr_scheduler_kwargs))
    except (TypeError, ValueError) as error:
        raise ValueError(f"lr_scheduler_type={name}: {error}") from error
    if not isinstance(schedule, LambdaLR):
        raise ValueError(f"lr_scheduler_type={name} follows a metric, which a run does not give it; choose another")
    return schedule


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
